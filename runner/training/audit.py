"""Takes parts of a training again, each from one kept checkpoint to the next, and says what of the record was forged."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samewise.runner.errors import CheckpointError
from samewise.runner.records import checkpoint
from samewise.runner.records.checkpoint_writer import copy_to_cpu
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.parting import Parting
from samewise.runner.records.rerun_comparison import Comparison
from samewise.runner.records.states import state_differences
from samewise.runner.records.trace import STAGES
from samewise.runner.tracking.journal import logged_values
from samewise.runner.tracking.tracker import Tracker
from samewise.runner.training.due import at_end
from samewise.runner.training.replay import parameter_names, replay
from samewise.runner.training.results import logged_partings, summary_partings
from samewise.runner.training.run import Run
from samewise.runner.training.state import restore, state_of, summarise


@dataclass(frozen=True)
class Segment:
    """The steps from one point from which training can go on, after `start` of them, to the next; and the checkpoint there, None where the trace ends."""

    start: int
    end: int
    kept: Path | None


@dataclass(frozen=True)
class Replayed:
    """A segment taken again: lines of the trace, state at its end and logged metrics, as far as they differ."""

    segment: Segment
    steps: Sequence[Parting]
    state: Sequence[tuple[str, str]]
    metrics: Sequence[Parting]


def segments(folder: RunFolder, last: int, *, resumed: bool) -> list[Segment]:
    """The parts of a run that can be taken again, in their order, up to the last step that is recorded. A checkpoint that cannot be read begins and ends none.

    `resumed`: whether it began with another run's checkpoint (`resume_from`), so that its first steps have no start.
    """
    points = [(0, None), *((kept.step, kept.path) for kept in checkpoint.list_checkpoints(folder.checkpoints) if kept.step and _is_sound(kept.path))]
    found = [Segment(start, end, path) for (start, _), (end, path) in itertools.pairwise(points)]
    if points[-1][0] < last:
        found.append(Segment(points[-1][0], last, None))
    return found[1:] if resumed else found


def _is_sound(path: Path) -> bool:
    try:
        return checkpoint.read(path)["step"] == int(path.name.removeprefix("step-"))
    except CheckpointError:
        return False


def choose(of: Sequence[Segment], count: int | None, seed: int, suspected: Sequence[Parting]) -> list[Segment]:
    """So many of them at random, None for all; and those to which something points that is wrong already."""
    drawn = of if count is None else random.Random(seed).sample(list(of), min(count, len(of)))
    firsts = {stage: next((parting.step for parting in suspected if parting.stage == stage), 0) for stage in ("chain", "root")}  # what follows is wrong too
    steps = {*firsts.values(), *(parting.step for parting in suspected if parting.stage not in firsts)}
    return [one for one in of if one in drawn or any(one.start < step <= one.end for step in steps)]


@dataclass
class Audit:
    """An audit of a recorded run: one built new from its config, whose callbacks are called. The comparison is one of them, and goes on where steps differ.

    `logged` has step, name and value of all that the recorded run logged.
    """

    run: Run
    folder: RunFolder
    comparison: Comparison
    logged: Sequence[tuple[int, str, float]]
    replayed: dict[Segment, Replayed] = field(default_factory=dict[Segment, Replayed])
    """What was taken again."""

    def __post_init__(self) -> None:
        self._initial = copy_to_cpu(state_of(self.run))
        self.run.recorder.tracker = Tracker(self.run.folder, resume_step=None)
        for callback in self.run.callbacks.values():
            callback.on_start(self.run.recorder.view)

    def replay(self, segment: Segment) -> Replayed:
        """Take a segment again."""
        if segment not in self.replayed:
            self.comparison.partings.clear()
            replay(self.run, self._state(segment.start), segment.end)
            self.run.recorder.tracker.before_checkpoint(segment.end)  # its journal is on the disk
            after, until = segment.start or -1, None if at_end(self.run) else segment.end
            metrics = logged_partings(self.logged, logged_values(self.run.folder.metrics), after=after, until=until)
            end = state_of(self.run) if segment.kept else {}
            differing = state_differences(checkpoint.load(segment.kept), end, parameter_names(self.run)) if segment.kept else []
            self.replayed[segment] = Replayed(segment, list(self.comparison.partings), differing, metrics)
        return self.replayed[segment]

    def _state(self, step: int) -> Mapping[str, Any]:
        return checkpoint.load(self.folder.checkpoints / f"step-{step:08d}") if step else self._initial

    def judge_summary(self, summary: Mapping[str, Any]) -> list[Parting]:
        """Where the run's summary is not what its last checkpoint gives, which `judge` holds against the steps before it."""
        for kept in checkpoint.list_checkpoints(self.folder.checkpoints)[-1:]:
            if summary and _is_sound(kept.path):
                restore(self.run, checkpoint.load(kept.path))
                return summary_partings(summary, summarise(self.run)) if at_end(self.run) else []
        return []

    def judge(self, segment: Segment, before: Segment | None) -> list[Parting]:
        """What was forged in a segment. Where it may be the checkpoint that it begins with, the one before, if there is one, is taken again too."""
        found, traced = self.replay(segment), [step for step in self.comparison.steps if segment.start < step <= segment.end]
        apart = [one.step for one in found.steps]
        if apart and apart[-1] == max(traced) and (found.state or not segment.kept):  # so are the weights that the training goes on with
            if apart[0] == min(traced) and before is not None and (forged := self._forged_start(before)):
                return forged
            return [_forged_step(found.steps[0], segment, found.state)]
        wrong = [_forged_line(one) for one in found.steps] + list(found.metrics)
        if found.state:
            # Weights or an optimizer that differed at the start would show in the steps; what a callback keeps would not.
            started = before is not None and not _is_trained(found.state)
            wrong += (self._forged_start(before) if started and before else []) or [_forged_checkpoint(segment, found.state)]
        return wrong

    def _forged_start(self, before: Segment) -> list[Parting]:
        found = self.replay(before)
        if not found.state:
            return []
        return [_forged_step(found.steps[0], before, found.state)] if found.steps else [_forged_checkpoint(before, found.state)]


def _is_trained(state: Sequence[tuple[str, str]]) -> bool:
    """Whether the weights or the optimizer differ: a start that differed in them would show in the steps."""
    return any(name.startswith(("weights", "the optimizer")) for name, _ in state)


def _forged_line(parting: Parting) -> Parting:
    reason = f"the trace was altered ({parting.stage}): the line is not what this step gives, and the training goes on as recorded"
    return Parting(parting.step, parting.stage, parting.layer, reason, altered=True)


def _forged_checkpoint(segment: Segment, state: Sequence[tuple[str, str]]) -> Parting:
    assert segment.kept is not None
    reason = f"{segment.kept.name} was altered: the steps before it are as recorded, and do not give it; {_named(state)}"
    return Parting(segment.end, "checkpoint", state[0][0].removeprefix("weights: "), reason)


def _forged_step(parting: Parting, segment: Segment, state: Sequence[tuple[str, str]]) -> Parting:
    settings = [f"{name}: {values}" for name, values in state if values]
    why = f"; {segment.kept.name} has another setting: {'; '.join(settings[:3])}" if settings and segment.kept else ""
    reason = f"was not computed as recorded, or from other data or code: {STAGES[parting.stage]}"
    return Parting(parting.step, parting.stage, parting.layer, reason + why)


def _named(state: Sequence[tuple[str, str]]) -> str:
    """The first that differs, and how many more."""
    values = f" ({state[0][1]})" if state[0][1] else ""
    return f"{len(state)} differ{'s' * (len(state) == 1)}{values}"
