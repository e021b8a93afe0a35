"""Finds why a step differs from its record: repeats it with the recorded config, again if they differ, and with the changed one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samewise.runner.errors import CheckpointError
from samewise.runner.records import checkpoint, trace
from samewise.runner.records.checkpoint_writer import copy_to_cpu
from samewise.runner.records.divergence import first_divergence
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.run import Run
from samewise.runner.training.state import state_of
from samewise.runner.training.step_inspection import ComputedValue, first_difference, inspect_step, replay_and_inspect, samples_of, unlike_sample


def explain_difference(folder: RunFolder, step: int, there: Run, here: Run | None) -> tuple[list[str], ComputedValue | None]:
    """Explain, in words, why a recorded run's first differing step differs; and the first value that does, if known.

    `there` is built from the original config, `here` from the changed one, None if nothing was changed; both are new.
    """
    head, lines = trace.read_trace_of(folder)
    for run in (there, here):
        if run is not None:
            run.recorder.trace.algorithm = trace.algorithm_of(folder.trace, head)
    first = max((known for known in lines if known < step), default=0) + 1  # a sparse trace shows only that it is one of several steps
    one, two = _nearest(folder, first, there), None if here is None else copy_to_cpu(state_of(here))
    for at in range(first, step + 1):
        seen, line, before = replay_and_inspect(there, one, at)
        agrees = at not in lines or first_divergence(head, lines[at], line) is None
        if not agrees:
            again, _ = inspect_step(there, before)
            if found := first_difference(seen, again):
                words = f"this is not deterministic here: step {at}, taken twice from the same state, differs first in {_describe(found)}"
                value = found[0] or found[1]
                sample = unlike_sample(there, at) if value and value.kind == "batch" else None
                return [words, *([f"{sample} differs when the sample is made again from the same seeds"] if sample else [])], value
        if here is not None and two is not None:
            other, _, _ = replay_and_inspect(here, two, at)
            found = first_difference(seen, other)
            if found:
                words = f"examined closely, step {at} differs first in {_describe(found)}"
                matches = "matches the record: the overrides cause the difference"
                differs = "does not match the record either: the overrides are not the only cause"
                return [words, f"trained without the overrides, step {at} {matches if agrees else differs}"], found[0] or found[1]
            two = copy_to_cpu(state_of(here))
        if not agrees:
            return list(_compare_with_record(there, at, head, lines[at], line)), None
        one = copy_to_cpu(state_of(there))
    return [f"examined closely, step {step} shows no difference: it did not occur again"], None


def _nearest(folder: RunFolder, step: int, run: Run) -> Mapping[str, Any]:
    """The state of the last readable checkpoint before a step, or that of a new run."""
    for kept in reversed(checkpoint.list_checkpoints(folder.checkpoints)):
        if 0 < kept.step < step:
            try:
                return checkpoint.load(kept.path)
            except CheckpointError:
                continue
    return copy_to_cpu(state_of(run))


def _describe(found: tuple[ComputedValue | None, ComputedValue | None]) -> str:
    one, two = found
    if one and two and (one.kind, one.name) == (two.kind, two.name):
        return str(one) + (f": {one.value} there, {two.value} here" if one.kind == "option" else "")
    return f"the order of computation: there {one or 'nothing more'} comes next, here {two or 'nothing more'}"


def _compare_with_record(run: Run, step: int, head: dict[str, Any], recorded: dict[str, Any], line: Mapping[str, Any]) -> Iterator[str]:
    yield f"step {step} gives the same bits each time here, but not the recorded ones: those come from another machine, other data or other code"
    stage, _ = first_divergence(head, recorded, line) or ("", "")
    if stage == "batch":
        samples = samples_of(run, step)
        more = f" and {len(samples) - 16} more" if len(samples) > 16 else ""
        yield f"it loads the samples {', '.join(map(str, samples[:16]))}{more} of dataset.train, one of which has changed"
