"""Repeats parts of a training, each from one kept checkpoint to the next, to compare the record."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from samewise.runner.data import streams
from samewise.runner.errors import CheckpointError, ConfigError
from samewise.runner.records import checkpoint
from samewise.runner.records.checkpoint_writer import copy_to_cpu
from samewise.runner.records.digest import value_digest
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.journal import logged_values
from samewise.runner.tracking.tracker import Tracker
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.evaluation import evaluate
from samewise.runner.training.loop import train_step
from samewise.runner.training.resuming import continue_from
from samewise.runner.training.run import Run, at_end, evaluation_due
from samewise.runner.training.state import restore, state_of, summarise
from samewise.runner.verify.divergence import Divergence
from samewise.runner.verify.record_comparison import (
    left_out_on_resuming,
    logged_divergences,
    summary_divergences,
)
from samewise.runner.verify.rerun_comparison import Comparison


@dataclass(frozen=True)
class Segment:
    """The steps between two checkpoints; `path` is the later one, None at the trace's end."""

    start: int
    end: int
    path: Path | None


def begin(run: Run) -> dict[str, Any] | None:
    """Restore the checkpoint of another run that a run continues (`resume_from`).

    Returns:
        The state of that run's trace; None if the checkpoint is missing or does not fit.
    """
    try:
        return continue_from(run, run.config.resume_from) if run.config.resume_from else {}
    except (CheckpointError, ConfigError):
        return None


def segments(folder: RunFolder, last: int, *, first: int | None = 0) -> list[Segment]:
    """Return the segments of a run, in order; damaged checkpoints do not bound a segment.

    Args:
        folder: The run's folder.
        last: The last recorded step.
        first: The step at which the run began; None: unknown, so its first steps are left out.
    """
    points = [
        (first or 0, None),
        *(
            (checkpoint_folder.step, checkpoint_folder.path)
            for checkpoint_folder in checkpoint.list_checkpoints(folder.checkpoints)
            # At step 0 the initial state stands for a checkpoint
            if checkpoint_folder.step and _is_sound(checkpoint_folder.path)
        ),
    ]
    parts = [Segment(start, end, path) for (start, _), (end, path) in itertools.pairwise(points)]
    if points[-1][0] < last:
        parts.append(Segment(points[-1][0], last, None))
    return parts[1:] if first is None else parts


def _is_sound(path: Path) -> bool:
    try:
        return checkpoint.read(path)["step"] == int(path.name.removeprefix("step-"))
    except CheckpointError:
        return False


def choose(
    parts: Sequence[Segment], count: int | None, seed: int, suspected: Sequence[Divergence]
) -> list[Segment]:
    """Draw segments at random, and add those with signs of an error.

    Args:
        parts: The run's segments.
        count: The number of segments to draw; None: all.
        seed: The seed of the draw.
        suspected: The signs of errors.
    """
    drawn = (
        # By a generator of its own, so that --audit-seed draws the same segments again
        parts if count is None else random.Random(seed).sample(list(parts), min(count, len(parts)))
    )
    # After the first of these, all later ones are wrong too
    firsts = {
        stage: next((x.step for x in suspected if x.stage == stage), 0)
        for stage in ("chain", "root")
    }
    steps = {*firsts.values(), *(x.step for x in suspected if x.stage not in firsts)}
    return [x for x in parts if x in drawn or any(x.start < step <= x.end for step in steps)]


@dataclass
class Audit:
    """An audit of a recorded run, by a new run of its config.

    Args:
        run: The new run.
        folder: The recorded run's folder.
        comparison: A callback of the new run, which continues after differences.
        logged: Step, name and value of each metric that the recorded run logged.
        start: The state that `begin` returned.
    """

    run: Run
    folder: RunFolder
    comparison: Comparison
    logged: Sequence[tuple[int, str, float]]
    start: Mapping[str, Any]

    def __post_init__(self) -> None:
        self._first, self._initial = (
            self.run.step,
            {**copy_to_cpu(state_of(self.run)), **self.start},
        )
        self._left_out = left_out_on_resuming(self.folder.metrics)
        self.run.recorder.tracker = Tracker(self.run.folder, resume_step=None)
        # As a session does, which an audit does not have
        for callback in self.run.callbacks.values():
            callback.on_start(self.run.recorder.view)

    def replay(self, segment: Segment) -> Divergence | None:
        """Repeat a segment.

        Returns:
            The first difference from the record in its steps, its metrics or its final state.
        """
        self.comparison.divergences.clear()
        replay(self.run, self._state(segment.start), segment.end)
        if self.comparison.divergences:
            return self.comparison.divergences[0]
        # Writes the journal, which is read next
        self.run.recorder.tracker.before_checkpoint(segment.end)
        metrics = logged_divergences(
            self.logged,
            logged_values(self.run.folder.metrics),
            # The first segment includes what was logged at step 0
            after=segment.start or -1,
            # Beyond the end of training the record may have nothing
            until=None if at_end(self.run) else segment.end,
            left_out=self._left_out,
        )
        if metrics or not segment.path:
            return min(metrics, key=lambda divergence: divergence.step, default=None)
        names = parameter_names(self.run)
        for name, values in state_differences(self._kept_state(segment), state_of(self.run), names):
            reason = f"these steps do not lead to {segment.path.name}" + f" ({values})" * bool(
                values
            )
            return Divergence(segment.end, "checkpoint", name.removeprefix("weights: "), reason)
        return None

    def _kept_state(self, segment: Segment) -> Mapping[str, Any]:
        """Return the checkpoint at a segment's end."""
        assert segment.path is not None
        state = checkpoint.load(segment.path)
        names = (
            self._state(segment.start).get("also", {})
            if segment.start > self._first
            else state.get("also", {})
        )
        # Metrics of `evaluate.also` that the checkpoint at its start lacks were added on resuming
        return {
            **state,
            "also": {name: best for name, best in state.get("also", {}).items() if name in names},
        }

    def _state(self, step: int) -> Mapping[str, Any]:
        return (
            checkpoint.load(self.folder.checkpoints / f"step-{step:08d}")
            if step > self._first
            else self._initial
        )

    def judge_summary(self, summary: Mapping[str, Any]) -> list[Divergence]:
        """Return the differences of the run's summary from its last checkpoint."""
        # `replay` compares that checkpoint with the steps before it
        for last in checkpoint.list_checkpoints(self.folder.checkpoints)[-1:]:
            if summary and _is_sound(last.path):
                # The summary is computed from the state at the end
                restore(self.run, checkpoint.load(last.path))
                return summary_divergences(summary, summarise(self.run)) if at_end(self.run) else []
        return []


_HOW = ("fused", "foreach", "differentiable", "capturable")
"""Options that choose an optimizer's implementation, by machine (`optim.states.load_state`)."""


def state_differences(
    there: Mapping[str, Any], here: Mapping[str, Any], names: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """Return the differences between two states, without times.

    Args:
        there: The recorded state.
        here: The state to compare.
        names: The names of each optimizer's parameters, in the order of the numbers in its state.

    Returns:
        Names of values that differ, each with a description; an empty one for a tensor.
    """
    differences = list(_differing_tensors(there["model"], here["model"], "weights"))
    for name, optimizer in there["optimizers"].items():
        differences += _optimizer_differences(
            optimizer, here["optimizers"].get(name, {}), names[name]
        )
    for part in ("schedule", "precision", "metrics", "best"):
        differences += _differing_tensors(there.get(part, {}), here.get(part, {}), part)
    for part in ("also", "callbacks"):
        entries, other_entries = there.get(part, {}), here.get(part, {})
        # Those of one side only may have been added or removed on resuming
        for name in entries.keys() & other_entries.keys():
            differences += _differing_tensors(entries[name], other_entries[name], f"{part}.{name}")
    return differences


def _optimizer_differences(
    there: Mapping[str, Any], here: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    for number, (group, other) in enumerate(
        zip(there["param_groups"], here.get("param_groups", ()), strict=False)
    ):
        for option in sorted({*group, *other} - {*_HOW, "params"}):
            yield from _differing_tensors(
                group.get(option),
                other.get(option),
                f"the optimizer's {option}" + (f" of group {number}" if number else ""),
            )
    for number, name in enumerate(names):
        state, other = there["state"].get(number, {}), here.get("state", {}).get(number, {})
        for part in [*state, *(part for part in other if part not in state)]:
            yield from _differing_tensors(
                state.get(part), other.get(part), f"the optimizer's {part} of {name}"
            )


def _differing_tensors(there: Any, here: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in [*there, *(name for name in here if name not in there)]:
            yield from _differing_tensors(there.get(name), here.get(name), f"{path}: {name}")
    elif (
        isinstance(there, list | tuple)
        and isinstance(here, list | tuple)
        and len(there) == len(here)
    ):
        for number, (tensor, other) in enumerate(zip(there, here, strict=True)):
            yield from _differing_tensors(
                tensor,
                other,
                f"{path}: {number}"
                if isinstance(tensor, Tensor | Mapping | list | tuple)
                else path,
            )
    elif isinstance(there, Tensor) and isinstance(here, Tensor):
        if value_digest(there.contiguous()) != value_digest(here.contiguous()):
            yield path, ""
    elif isinstance(there, Tensor) or isinstance(here, Tensor):
        yield (
            path,
            "a tensor there, none here"
            if isinstance(there, Tensor)
            else "a tensor here, none there",
        )
    # By `repr`, so that NaN equals NaN
    elif repr(there) != repr(here):
        yield path, f"{there!r} there, {here!r} here"


def replay(run: Run, state: Mapping[str, Any], until: int) -> None:
    """Restore `state`, and train up to step `until`, with the evaluation due there.

    Unlike `fit` it has no checkpoints and no signal handling. It calls callbacks, and writes the
    trace to the run's folder, which must exist. The run is in one process.
    """
    restore(run, state)
    run.recorder.trace.open(run.step, state.get("trace", 0))
    try:
        with streams.preserve_generators():
            batches = TrainingBatches(run)
            while True:
                if evaluation_due(run):
                    evaluate(run)
                if run.step >= until:
                    break
                run.recorder.record(train_step(run, next(batches)))
    finally:
        run.recorder.trace.close()


def parameter_names(run: Run) -> dict[str, Sequence[str]]:
    """Return the names of each phase's parameters, in the order of its optimizer's state."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    return {
        phase.spec.name: [
            names[id(x)] for group in phase.optimizer.param_groups for x in group["params"]
        ]
        for phase in run.phases
    }
