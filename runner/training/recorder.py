"""Records a run: the trace of each step, logged metrics, and calls of callbacks."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Callback, Outcome, RunView, Scores
from samewise.runner.records.trace import Trace
from samewise.runner.tracking.tracker import Silent, Tracker


@dataclass
class Recorder:
    """Records a run without changing any number.

    Args:
        trace: The run's trace.
        callbacks: Callbacks by name, in calling order.
        log_every_steps: Steps between two entries of the losses.
        level: The strongest promise that the run can make, from none to R3; the session lowers it
            if the environment has changed.
    """

    trace: Trace
    callbacks: dict[str, Callback]
    log_every_steps: int
    level: str
    cautions: list[Problem] = field(default_factory=list[Problem])
    """Warnings to print when training starts, and those printed since."""
    prints: bool = True
    """Whether warnings are printed at once; `check` prints them at its end."""
    view: RunView = field(init=False)
    """The run as its callbacks see it."""
    tracker: Tracker = field(default_factory=Silent)
    """The session opens it, once it knows the step at which the run resumes."""
    overflowed: int = 0
    """Updates skipped in this session, because their gradients were too large for float16."""
    saved: int | None = None
    """The step of the last checkpoint."""
    saved_s: float = 0.0
    """The seconds of training at the last checkpoint."""
    scores: Mapping[str, Scores] = field(default_factory=dict[str, Scores])
    """The last evaluation's scores, by split, for its pictures."""
    require_folder: Callable[[], None] = lambda: None
    """A function that raises a TrainingError if the folder that the session locked is missing."""
    _pending: dict[str, float] = field(default_factory=dict[str, float])
    _is_recording: bool = False
    _calling: str = ""
    """The name of the callback that is running."""
    _of_step: Mapping[str, float] = field(default_factory=dict[str, float])
    """The metrics of the step being recorded, logged or not."""

    def record(self, outcome: Outcome) -> None:
        """Record a step: its trace, its metrics, and its callbacks."""
        self._is_recording = True
        # Only float16 gets here with a norm that is not finite: other steps have raised an error
        self.overflowed += sum(not math.isfinite(norm) for norm in outcome.gradient_norms.values())
        self.trace.record(
            outcome.step,
            batch=outcome.batch,
            inputs=outcome.inputs,
            loss=outcome.losses.get("loss", sum(outcome.losses.values())),
        )
        self._of_step = {
            f"train/{name}": value
            for name, value in (*outcome.losses.items(), *outcome.gradient_norms.items())
        }
        if outcome.step % self.log_every_steps == 0:
            self.log(self._of_step, outcome.step)
        self.notify("on_step", outcome)
        if outcome.step % self.view.steps_per_epoch == 0:
            self.notify("on_epoch_end")
        self._is_recording, self._of_step = False, {}
        self._send(outcome.step)

    def notify(self, hook: str, *values: Any) -> None:
        """Call a hook of each callback, with the run and further values."""
        for callback in self.called():
            getattr(callback, hook)(self.view, *values)

    def called(self) -> Iterator[Callback]:
        """Yield the callbacks, and note which one is running, for errors."""
        try:
            for name, callback in self.callbacks.items():
                self._calling = name
                yield callback
        finally:
            self._calling = ""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics; those of a step's callbacks become one entry, at the step's end."""
        self._pending.update(metrics)
        if not self._is_recording:
            self._send(step)

    def require_others(self, metrics: Mapping[str, float], evaluated: Mapping[str, float]) -> None:
        """Raise a ConfigError if a callback logs a metric that the run logs itself."""
        if taken := metrics.keys() & {
            "train/loss",
            "train/gradient_norm",
            "epoch",
            *self._of_step,
            *evaluated,
        }:
            raise ConfigError(
                Problem(
                    f"callbacks.{self._calling}".rstrip("."),
                    f"logs '{min(taken)}', which samewise logs itself",
                    expected="a metric with another name",
                )
            )

    def _send(self, step: int) -> None:
        if self._pending:
            self.tracker.log(self._pending, step)
        self._pending = {}

    def stop_reason(self) -> str | None:
        """Return a callback's reason to end training; None if all go on."""
        return next(filter(None, (x.stop_reason() for x in self.callbacks.values())), None)
