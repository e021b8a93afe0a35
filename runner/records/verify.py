"""Train a run again beside the first and compare, step by step; and hold its checkpoints against its trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from samewise.runner.errors import CheckpointError, SamewiseError
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records import checkpoint, trace
from samewise.runner.records.digest import state_digest
from samewise.runner.records.folder import RunFolder


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
    """What is wrong with the run's checkpoints, by step: altered files, and weights that are not the trace's."""
    head, lines = trace.read_trace_of(folder)
    partings: list[Parting] = []
    for kept in checkpoint.list_checkpoints(folder.checkpoints):
        try:
            state = checkpoint.load(kept.path)
        except CheckpointError as error:
            partings.append(Parting(kept.step, "checkpoint", "", str(error.problems[0]).partition("\n")[0]))
            continue
        line: Mapping[str, Any] = lines.get(kept.step, {})
        weights = state_digest(state["model"], shards=head.get("shards", 1), sharded=head.get("gradients", ()))
        if line and f"{weights:016x}" != line["weights"]:
            partings.append(Parting(kept.step, "checkpoint", "", f"the weights in {kept.path.name} differ from those in the trace"))
    return partings
