"""Train a run again beside the first and compare, step by step; and hold its checkpoints against its trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from samewise.runner.errors import CheckpointError, SamewiseError
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records import checkpoint, trace
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.roots import alterations


@dataclass(frozen=True)
class Parting:
    """The first difference of two runs.

    Args:
        step: The optimizer step, counted from 1.
        stage: A key of `trace.STAGES`, or "checkpoint".
        layer: The first parameter or buffer that differs, where one is named.
        reason: A sentence.
    """

    step: int
    stage: str
    layer: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}" + (f"; first in {self.layer}" if self.layer else "")


class Parted(SamewiseError):
    """Ends the second training at the first difference."""

    def __init__(self, parting: Parting) -> None:
        self.parting = parting
        super().__init__(str(parting))


@final
class Comparison(Callback):
    """Holds each step's line of the trace against the other run's.

    Args:
        folder: The other run.
        steps: Compare so many steps at most; None: all that it has.
    """

    def __init__(self, folder: RunFolder, *, steps: int | None = None) -> None:
        self._head, self._lines = trace.read_trace_of(folder)
        self.wanted = sum(steps is None or step <= steps for step in self._lines)
        """How many steps will be compared: those of the trace, which may be every hundredth."""
        self.missing = trace.what_is_missing(self._lines)
        """What of the trace is not there, in words."""
        self.compared = 0
        self._to_the_end = steps is None and folder.summary.exists()  # where the weights are compared too

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        expected, found = self._lines.get(outcome.step), run.traced
        if expected is None or found.get("step") != outcome.step:
            return
        parted = trace.parting(self._head, expected, found)
        if parted:
            stage, layer = parted
            raise Parted(Parting(outcome.step, stage, layer, trace.STAGES[stage]))
        self.compared += 1

    def stop_reason(self) -> str | None:
        return "everything that the first run recorded has been compared" if self.compared >= self.wanted and not self._to_the_end else None


def checkpoint_partings(folder: RunFolder) -> list[Parting]:
    """What is wrong with the run's checkpoints, by step: altered files, and states that are not those of the trace or of the summary."""
    head, lines = trace.read_trace_of(folder)
    altered, partings = alterations(folder), list[Parting]()
    for kept in checkpoint.list_checkpoints(folder.checkpoints):
        try:
            state = checkpoint.load(kept.path)
        except CheckpointError as error:
            partings.append(Parting(kept.step, "checkpoint", "", str(error.problems[0]).partition("\n")[0]))
            continue
        for layer, reason in _unbound(head, lines, kept, state):
            partings.append(Parting(kept.step, "checkpoint", layer, reason))
        if reason := altered.get(str(kept.step)):
            partings.append(Parting(kept.step, "checkpoint", "", reason))
    return partings


def _unbound(head: Mapping[str, Any], lines: Mapping[int, Mapping[str, Any]], kept: checkpoint.Kept, state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Why a checkpoint is not one that was taken at its step of the trace: (tensor, reason)."""
    if state["step"] != kept.step:
        yield "", f"{kept.path.name} was taken at step {state['step']}"
        return
    line = lines.get(kept.step)
    layer = trace.altered_weights(head, line, state["model"]) if line else None
    if layer is not None:
        yield layer, f"the weights in {kept.path.name} differ from those in the trace"
    before = max((step for step in lines if step <= kept.step), default=None)
    if before is not None and "trace" in state and state["trace"] != int(lines[before]["chain"], 16):
        yield "", f"{kept.path.name} was not taken in a run with this trace: the trace was altered at step {before} or before, or the checkpoint was"
