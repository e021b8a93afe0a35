"""What is looked at in the first steps of a training, in code of the user's: warnings, and a lower
level where a promise cannot be kept.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice

import torch
from torch import nn

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, first_few
from samewise.runner.records import shapes
from samewise.runner.records.digest import value_digest
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.summary import LEVELS
from samewise.runner.strategies.recompute import mark
from samewise.runner.training.evaluation import tell
from samewise.runner.training.guards.hidden_state import (
    changed_in_optimizers,
    copy_of_state,
    find,
    find_in_schedule,
    is_own,
    may_look,
    same_values,
    state_of_optimizers,
    try_out,
)
from samewise.runner.training.losses import losses_of
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
        message = (
            f"nothing trains {first_few(idle, 3)}: no phase's loss gave a gradient in the "
            "first step"
        )
        found.append(
            Problem(
                "model",
                message,
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


_FACTOR = 1000
"""By how much parameters are multiplied, each by another factor: so far that limits on them are
exceeded, and copies are no longer equal."""


def find_changed_parameters(
    run: Run, micro_batches: Sequence[MicroBatch]
) -> list[tuple[Problem, str]]:
    """A caution, and the level of reproducibility that is left, if a forward pass in training
    changes parameters and there are several replicas.
    """
    if run.config.replicas == 1 or not may_look(run):
        return []
    changed = (try_out(run, micro_batches[0], _changed_parameters) or {}) if micro_batches else {}
    everyone = [one for one in run.strategy.peers.gather(changed) if one]
    if not everyone:
        return []
    apart = any(one != everyone[0] for one in everyone)
    message = (
        f"a forward pass changes parameters ({first_few([*everyone[0]], 3)}), once for each "
        "replica that a process has"
    )
    message += (
        "; here each process would change them otherwise, so that they differ"
        if apart
        else ": with another number of processes, they become others"
    )
    hint = (
        "replicas=1; or keep what no optimizer trains in buffers: all replicas of a step begin "
        "with the same ones, and replica 0's are kept"
    )
    return [(Problem("model", message, hint=hint), "none" if apart else "R1")]


def _changed_parameters(run: Run, micro: MicroBatch) -> dict[str, int]:
    """The parameters that computing a micro-batch's losses in training changes, by name, each with
    a digest of what it becomes from other weights.

    torch counts changes in place, even those that change no value yet; a change of `parameter.data`
    shows in its address or its values.
    """
    held = copy_of_state(run)
    parameters = {name: one for name, one in run.model.named_parameters() if name in held}

    try:
        before = {name: mark(one) for name, one in parameters.items()}
        _ = [*losses_of(run, micro)]
        changed = [
            name
            for name, one in parameters.items()
            if before[name] != mark(one) or not same_values(one.detach(), held[name])
        ]
        if changed:
            run.model.load_state_dict(held)
            with torch.no_grad():
                for number, one in enumerate(parameters.values()):
                    one.mul_(_FACTOR + number)
            with suppress(Exception):  # not every model computes with any weights
                _ = [*losses_of(run, micro)]
        return {name: value_digest(parameters[name].detach()) for name in changed}
    finally:
        run.model.load_state_dict(held)
