"""What is looked at in the first steps of a training, in code of the user's: warnings, and a lower
level where a promise cannot be kept.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice

from torch import nn

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, first_few
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.summary import LEVELS
from samewise.runner.training.changed_parameters import find_changed_parameters
from samewise.runner.training.evaluation import tell
from samewise.runner.training.hidden_state import (
    changed_in_optimizers,
    find,
    find_in_schedule,
    is_own,
    state_of_optimizers,
)
from samewise.runner.training.run import Run


def warn_of_hidden_state(
    run: Run, batches: Iterator[list[MicroBatch]]
) -> Iterator[list[MicroBatch]]:
    """The batches.

    With the first three, a warning if something is found, and a lower level for the run: it cannot
    be resumed to the same bits.
    """
    told = False
    for first in islice(batches, 1):
        _warn(run, [*find(run, first), *find_in_schedule(run)])
        told = _warn_of_changed_parameters(run, first)
        own = run.strategy.compiles and (is_own(run.recipe) or is_own(run.model))
        with untrained(run) if own else nullcontext(list[Problem]()) as idle:
            yield first  # the step
        for problem in idle:
            tell(run, problem)
    # After a step, in which an optimizer may have created what it needs
    before = state_of_optimizers(run)
    for second in islice(batches, 1):
        if (
            not told
        ):  # a copy of weights was equal to them until then, so an average of both changed nothing
            _warn_of_changed_parameters(run, second)
        yield second
    _warn(run, changed_in_optimizers(run, before))
    yield from batches


@contextmanager
def untrained(run: Run) -> Generator[list[Problem]]:
    """Watch a step.

    Afterwards the list has a caution if parameters that are trained from the beginning got no
    gradient in any phase.
    """
    found, reached = list[Problem](), set[nn.Parameter]()
    waiting = {
        id(one) for phase in run.phases for later in phase.waiting[:1] for one in later.parameters
    }
    trained = {
        name: one
        for name, one in run.model.named_parameters()
        if one.requires_grad and id(one) not in waiting
    }
    hooks = [one.register_post_accumulate_grad_hook(reached.add) for one in trained.values()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    if idle := [name for name, one in trained.items() if one not in reached]:
        words = (
            f"nothing trains {first_few(idle, 3)}: no phase's loss gave a gradient in the "
            "first step"
        )
        found.append(
            Problem(
                "model",
                words,
                hint="train them in a phase, or freeze them: initialise.frozen=[NAMES]",
            )
        )


def _warn_of_changed_parameters(run: Run, micro_batches: Sequence[MicroBatch]) -> bool:
    """Whether something was found, in any process."""
    for problem, level in (found := find_changed_parameters(run, micro_batches)):
        _warn(run, [problem], level)
    return bool(found)


def _warn(run: Run, problems: Sequence[Problem], level: str = "none") -> None:
    if problems:
        run.recorder.level = level = min(run.recorder.level, level, key=[*LEVELS].index)
        if run.strategy.peers.is_main and (
            record := read_json(run.folder.environment, shapes.ENVIRONMENT)
        ):
            write_json(run.folder.environment, {**record, "level": level})
    for problem in problems:
        tell(run, problem)
