"""Why a step differs from its record: taken again as it was, twice where that does not agree, and beside what was changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from samewise.runner.errors import CheckpointError
from samewise.runner.records import checkpoint, trace
from samewise.runner.records.checkpoint_writer import copy_to_cpu
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.parting import first_parting
from samewise.runner.training.closely import Noted, first_difference, look, look_at, samples_of
from samewise.runner.training.run import Run
from samewise.runner.training.state import state_of


def tell_apart(folder: RunFolder, step: int, there: Run, here: Run | None) -> tuple[list[str], Noted | None]:
    """What makes a step of a recorded run differ, the first of its trace that does, in words, and the first thing that does, where one is known.

    `there` is built from its config as it was, `here` from one that was changed, None where nothing was; both are new.
    """
    head, lines = trace.read_trace_of(folder)
    for run in (there, here):
        if run is not None:
            run.recorder.trace.algorithm = trace.algorithm_of(folder.trace, head)
    first = max((known for known in lines if known < step), default=0) + 1  # a sparse trace says only that it is one of several
    one, two = _nearest(folder, first, there), None if here is None else copy_to_cpu(state_of(here))
    for at in range(first, step + 1):
        seen, line, before = look_at(there, one, at)
        agrees = at not in lines or first_parting(head, lines[at], line) is None
        if not agrees:
            again, _ = look(there, before)
            if found := first_difference(seen, again):
                words = f"this is not deterministic here: step {at}, taken twice from the same state, differs first in {_described(found)}"
                return [words], found[0] or found[1]
        if here is not None and two is not None:
            other, _, _ = look_at(here, two, at)
            found = first_difference(seen, other)
            if found:
                words = f"examined closely, step {at} differs first in {_described(found)}"
                matches = "matches the record: the overrides cause the difference"
                differs = "does not match the record either: the overrides are not the only cause"
                return [words, f"trained without the overrides, step {at} {matches if agrees else differs}"], found[0] or found[1]
            two = copy_to_cpu(state_of(here))
        if not agrees:
            return list(_unlike_the_record(there, at, head, lines[at], line)), None
        one = copy_to_cpu(state_of(there))
    return [f"examined closely, step {step} shows no difference: it did not occur again"], None


def _nearest(folder: RunFolder, step: int, run: Run) -> Mapping[str, Any]:
    """The state of the last checkpoint before a step that can be read, else that of a new run."""
    for kept in reversed(checkpoint.list_checkpoints(folder.checkpoints)):
        if 0 < kept.step < step:
            try:
                return checkpoint.load(kept.path)
            except CheckpointError:
                continue
    return copy_to_cpu(state_of(run))


def _described(found: tuple[Noted | None, Noted | None]) -> str:
    one, two = found
    if one and two and (one.kind, one.name) == (two.kind, two.name):
        return str(one) + (f": {one.value} there, {two.value} here" if one.kind == "option" else "")
    return f"the order of computation: there {one or 'nothing more'} comes next, here {two or 'nothing more'}"


def _unlike_the_record(run: Run, step: int, head: dict[str, Any], recorded: dict[str, Any], line: Mapping[str, Any]) -> Iterator[str]:
    yield f"step {step} gives the same bits each time here, but not the recorded ones: those come from another machine, other data or other code"
    stage, _ = first_parting(head, recorded, line) or ("", "")
    if stage == "batch":
        samples = samples_of(run, step)
        more = f" and {len(samples) - 16} more" if len(samples) > 16 else ""
        yield f"it loads the samples {', '.join(map(str, samples[:16]))}{more} of dataset.train, one of which has changed"
