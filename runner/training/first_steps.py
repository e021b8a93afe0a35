"""What is looked at in the first steps of a training, in code of the user's: warnings, and a lower level where a promise cannot be kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.summary import LEVELS
from samewise.runner.strategies.tree import copy_all, unchanged_buffers
from samewise.runner.training.changed_parameters import find_changed_parameters
from samewise.runner.training.evaluation import tell
from samewise.runner.training.hidden_state import changed_in_optimizers, find, find_in_schedule, is_own, state_of_optimizers
from samewise.runner.training.loss_checks import means_for_sums, untrained
from samewise.runner.training.overruled_options import warn_of_overruled_options
from samewise.runner.training.run import Run


def warn_of_hidden_state(run: Run, batches: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
    """The batches; with the first three, a warning if something is found, and a lower level for the run: it cannot be resumed to the same bits."""
    told = False
    for first in islice(batches, 1):
        _warn(run, [*find(run, first), *find_in_schedule(run)])
        told = _warn_of_changed_parameters(run, first)
        own = run.strategy.compiles and (is_own(run.recipe) or is_own(run.model))
        for problem in _means(run) if own else ():
            tell(run, problem)
        warn_of_overruled_options(run)
        with untrained(run) if own else nullcontext(list[Problem]()) as idle:
            yield first  # the step
        for problem in idle:
            tell(run, problem)
    before = state_of_optimizers(run)  # after a step, in which an optimizer may have created what it needs
    for second in islice(batches, 1):
        if not told:  # a copy of weights was equal to them until then, so an average of both changed nothing
            _warn_of_changed_parameters(run, second)
        yield second
    _warn(run, changed_in_optimizers(run, before))
    yield from batches


def _warn_of_changed_parameters(run: Run, micro_batches: Sequence[MicroBatch]) -> bool:
    """Whether something was found, in any process."""
    for problem, level in (found := find_changed_parameters(run, micro_batches)):
        _warn(run, [problem], level)
    return bool(found)


def _means(run: Run) -> list[Problem]:
    """Of losses that are means, where a user's code may exchange nothing with other processes, and this one may load samples."""
    if run.strategy.peers.size > 1 or run.config.reproducibility.level == "fast":
        return []
    held = [one.detach().clone() for one in run.model.parameters()]
    with unchanged_buffers(run.model):
        try:
            return means_for_sums(run)
        finally:
            copy_all([one.detach() for one in run.model.parameters()], held)


def _warn(run: Run, problems: Sequence[Problem], level: str = "none") -> None:
    if problems:
        run.recorder.level = level = min(run.recorder.level, level, key=[*LEVELS].index)
        if run.strategy.peers.is_main and (record := read_json(run.folder.environment, shapes.ENVIRONMENT)):
            write_json(run.folder.environment, {**record, "level": level})
    for problem in problems:
        tell(run, problem)
