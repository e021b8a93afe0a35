"""A `Run`: the parts of a training, its progress, its recorder and its guards, as `build` makes them.

Whether an evaluation or a checkpoint is due follows from the step alone, so a resumed run does
exactly what the interrupted one had still to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from samewise.runner.config import schema
from samewise.runner.config.compose import Composed
from samewise.runner.data.keyed import KeyedDataset
from samewise.runner.data.loading import Loader, MicroBatch
from samewise.runner.data.order import Order
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Interrupted, Problem
from samewise.runner.interfaces import Batch, Callback, Recipe
from samewise.runner.optim.schedules import Schedule
from samewise.runner.precision import Precision
from samewise.runner.records.checkpoint_writer import Checkpoints
from samewise.runner.records.folder import RunFolder
from samewise.runner.strategies.base import Strategy
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.recorder import Recorder


@dataclass
class Split:
    """A split of the data set, ready to load."""

    name: str
    dataset: Any
    keyed: KeyedDataset
    loader: Loader | None = None

    @property
    def is_validation(self) -> bool:
        """Whether the split is evaluated in training: `valid` or `valid_NAME`."""
        return self.name.partition("_")[0] == "valid"


@dataclass
class Progress:
    """The position and state of a run, all of it in checkpoints."""

    step: int = 0
    """Optimizer steps done; the only position there is."""
    evaluated: int = -1
    """The step of the last evaluation."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """The last evaluation's metrics."""
    best: dict[str, float] = field(default_factory=dict[str, float])
    """The metrics of the best evaluation by `evaluate.monitor`, with its `step`."""
    also: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """The metrics of the best evaluation by each metric of `evaluate.also`, with its `step`."""
    recent: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """The losses of the last steps by phase, if those of spikes are skipped."""
    earlier_s: float = 0.0
    """Seconds of training before the clock was started."""
    _started: float | None = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds of training, in this and earlier sessions of the run."""
        return self.earlier_s + (0.0 if self._started is None else time.monotonic() - self._started)

    def stop_clock(self) -> None:
        """Stop counting seconds, at the end of training."""
        self.earlier_s, self._started = self.seconds, None

    def state(self) -> dict[str, Any]:
        """Return the progress as plain values."""
        added = {
            "also": self.also,
            "recent": {name: [*losses] for name, losses in self.recent.items()},
        }
        return {
            "step": self.step,
            "evaluated": self.evaluated,
            "metrics": self.metrics,
            "best": self.best,
            **{name: value for name, value in added.items() if value},
            "seconds": self.seconds,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self.step, self.evaluated = state["step"], state["evaluated"]
        self.metrics, self.best, self.earlier_s = state["metrics"], state["best"], state["seconds"]
        self.also, self.recent = state.get("also", {}), state.get("recent", {})


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training: parts, progress, a recorder and guards.

    The parts are made once; weights and optimizer states change inside them. A checkpoint holds
    the progress and the parts' states.
    """

    composed: Composed
    environment: dict[str, Any]
    folder: RunFolder
    fingerprint: str
    seed: int
    recipe: Recipe
    model: nn.Module
    network: nn.Module
    """The model as the strategy wraps it; called in training."""
    parameters: Sequence[nn.Parameter]
    """All parameters of the model."""
    phases: Sequence[TrainingPhase]
    schedule: Schedule
    precision: Precision
    strategy: Strategy
    transforms: Mapping[str, Callable[[Batch], Batch]]
    splits: Mapping[str, Split]
    order: Order
    plan: Plan
    total_steps: int
    batch_size: int
    micro_batches: int
    skip_spikes: float | None
    evaluate: schema.Evaluate
    checkpoint: schema.Checkpoint
    checkpoints: Checkpoints
    to_device: Callable[[Batch], Batch]
    recorder: Recorder
    guards: list[Guard] = field(default_factory=list["Guard"])
    """The guards that watch the run, in calling order."""
    progress: Progress = field(default_factory=Progress)

    @property
    def config(self) -> Any:
        """The resolved config, typed by `schema.Experiment`."""
        return self.composed.cfg

    @property
    def callbacks(self) -> dict[str, Callback]:
        """Callbacks by name, in calling order."""
        return self.recorder.callbacks

    @property
    def step(self) -> int:
        """The number of optimizer steps done."""
        return self.progress.step

    @property
    def epoch(self) -> float:
        """The number of epochs done, with a fraction."""
        return self.step / self.plan.steps_per_epoch

    def clear_gradients(self) -> None:
        """Clear all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def learning_rates(self) -> list[float]:
        """Return the distinct learning rates of all phases' parameter groups, in order."""
        return list(dict.fromkeys(rate for phase in self.phases for rate in phase.learning_rates()))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics at the current step, or raise a ConfigError if one is not a number."""
        ConfigError.raise_all(
            Problem(name, "this metric is not a number", value, "a number")
            for name, value in metrics.items()
            if not hasattr(value, "__float__")
        )
        self.recorder.log(metrics, self.step)


class Caution(NamedTuple):
    """A guard's warning."""

    problem: Problem
    level: str = "R3"
    """The strongest promise that the run can still make."""


class Numbers(NamedTuple):
    """The numbers of a phase of a step."""

    losses: Mapping[str, float]
    """The phase's losses, by name."""
    norm: float
    """The 2-norm of its gradients."""
    gradients: Sequence[Tensor | None] | None
    """The largest magnitude of each parameter's gradient, in the model's order; None: the
    gradients still exist."""
    explain: Sequence[Callable[[], None]]
    """Functions that raise the recipe's own explanation of a loss that is not finite."""


class Guard:
    """Watches the user's code in a run.

    A subclass overrides the moments at which it looks. It warns with cautions, and stops the run
    with an error. `guards.catalogue` lists the guards, and has each look.

    Args:
        run: The run, before its first step.
    """

    looks: ClassVar[frozenset[str]] = frozenset()
    """The moments at which it looks: the methods that it overrides. No step calls the others."""

    def __init__(self, run: Run) -> None: ...

    def __init_subclass__(cls) -> None:
        cls.looks = cls.looks | vars(cls).keys()

    def at_start(self, run: Run) -> Iterable[Caution]:
        """Look at the parts of a new run, in one process, before anything is computed."""
        return ()

    def before_evaluation(self, run: Run) -> Iterable[Caution]:
        """Look at the evaluation, in one process: in training before the first step."""
        return ()

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        """Look before a step, at this process's samples of it."""
        return ()

    def on_numbers(self, run: Run, numbers: Numbers) -> Iterable[Caution]:
        """Look at a phase's numbers: on the CPU before its optimizer steps."""
        return ()

    def after_step(self, run: Run) -> Iterable[Caution]:
        """Look after a step."""
        return ()

    def before_checkpoint(self, run: Run) -> Iterable[Caution]:
        """Look before a checkpoint is written."""
        return ()


def evaluation_due(run: Run) -> bool:
    """Whether an evaluation is due at this step and was not made yet."""
    if run.progress.evaluated == run.step or _at_start(run):
        return False
    every = evaluation_interval(run)
    return at_end(run) or (bool(every) and run.step % every == 0)


def evaluation_interval(run: Run) -> int:
    """Return the steps between two evaluations; 0 if the only one is at the end."""
    epochs = run.evaluate.every_epochs or 0
    return run.evaluate.every_steps or max(round(epochs * run.plan.steps_per_epoch), bool(epochs))


def checkpoint_due(run: Run) -> bool:
    """Whether a checkpoint is due, or the run was asked to stop."""
    settings = run.checkpoint
    if run.recorder.saved == run.step or _at_start(run):
        return False
    by_steps = bool(settings.every_steps) and run.step % settings.every_steps == 0
    by_epochs = (
        bool(settings.every_epochs)
        and run.step % (settings.every_epochs * run.plan.steps_per_epoch) == 0
    )
    minutes = (run.progress.seconds - run.recorder.saved_s) / 60
    if settings.every_minutes and minutes >= settings.every_minutes:
        run.strategy.peers.ask_save()
    is_best = settings.keep_best > 0 and any(
        best.get("step") == run.step for best in (run.progress.best, *run.progress.also.values())
    )
    return (
        by_steps
        or by_epochs
        or is_best
        or at_end(run)
        or run.strategy.peers.save_agreed
        or run.strategy.peers.stop_agreed is not None
    )


def is_done(run: Run) -> bool:
    """Whether training has ended.

    Raises:
        Interrupted: The run was asked to stop, and is saved.
        TrainingError: The last checkpoint could not be written.
    """
    # Checkpoints are written in a thread, whose error is raised here
    run.checkpoints.raise_failure()
    if at_end(run):
        return True
    if reason := run.strategy.peers.stop_agreed:
        raise Interrupted(
            Problem(
                f"step {run.step}",
                f"stopped by {reason}, and saved",
                hint="run the same command again to resume",
            )
        )
    return False


def at_end(run: Run) -> bool:
    """Whether all steps are done, or a callback ends training."""
    return run.step >= run.total_steps or run.recorder.stop_reason() is not None


def _at_start(run: Run) -> bool:
    """Whether a run with steps to train is at its first."""
    return run.step == 0 < run.total_steps
