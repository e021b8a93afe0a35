"""Compares the steps of a second training with a recorded run, and ends it where they differ."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, final

from samewise.runner.errors import SamewiseError
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records import shapes, trace_reader
from samewise.runner.records.files import parse_json, read_json, read_lines
from samewise.runner.records.folder import RunFolder
from samewise.runner.verify.divergence import (
    Divergence,
    describe_tensors,
    first_divergence,
    only_in,
    other_start,
    trace_divergence,
)


class Diverged(SamewiseError):
    """Ends the second training at the first step that differs."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"step {step} differs")


@final
class Comparison(Callback):
    """Compares each step's trace line with the recorded run's.

    Args:
        folder: The recorded run's folder.
        steps: The number of steps to compare; None: all.
    """

    def __init__(self, folder: RunFolder, *, steps: int | None = None) -> None:
        self._folder = folder
        self._head, self._lines = trace_reader.read_trace_of(folder)
        self.algorithm = trace_reader.algorithm_of(folder.trace, self._head)
        """The algorithm of the recorded digests, for the second training."""
        self.total = sum(steps is None or step <= steps for step in self._lines)
        """The number of steps to compare: those in the trace, such as every hundredth."""
        self.missing = trace_reader.missing_start(self._lines)
        """A description of lines that the trace lacks."""
        self.compared = 0
        # Train to the end if the summary is compared too
        self._to_the_end = steps is None and folder.summary.exists()
        summary = (read_json(folder.summary, shapes.SUMMARY) or {}) if self._to_the_end else {}
        # A sparse trace ends earlier
        self._stopped, self._stop_at = (
            summary.get("stopped_early"),
            max([summary.get("steps", 0), *self._lines]),
        )
        self._is_at_stop = self._has_begun = False

    @property
    def steps(self) -> Collection[int]:
        """The steps in the recorded run's trace."""
        return self._lines.keys()

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        expected, actual = self._lines.get(outcome.step), run.traced
        # Only a run that stopped before its last step needs a reason
        self._is_at_stop = self._stop_at <= outcome.step < run.total_steps
        if not self._has_begun and other_start(self._head, _head_of(run)):
            raise Diverged(outcome.step)
        self._has_begun = True
        if expected is None or actual.get("step") != outcome.step:
            return
        if first_divergence(self._head, expected, actual):
            raise Diverged(outcome.step)
        self.compared += 1

    def divergence(self, again: RunFolder, step: int, settings: Collection[str]) -> Divergence:
        """Return the first difference.

        Args:
            again: The second training's folder.
            step: The step that differs.
            settings: The settings that differ, which may explain it.
        """
        head, lines = trace_reader.read_trace(again.trace)
        heads, traces = (self._head, head), (self._lines, lines)
        divergence = trace_divergence((self._folder, again), heads, traces, settings=settings)
        other_tensors = describe_tensors(
            [only_in(self._head, head), only_in(head, self._head)], ("there", "here")
        )
        if divergence and not (other_tensors and divergence.stage in ("gradients", "weights")):
            return divergence
        return Divergence(step, "weights", "", other_tensors)

    def stop_reason(self) -> str | None:
        if self._stopped and self._is_at_stop:
            # The reason may not occur here, such as the decision of a sweep
            return self._stopped
        if self.compared < self.total or self._to_the_end:
            return None
        return "everything that the first run recorded has been compared"


def _head_of(run: RunView) -> dict[str, Any]:
    # The first line of a trace is its head
    _, line = next(read_lines(run.folder / "trace.jsonl"), (1, b"{}"))
    return parse_json(line)
