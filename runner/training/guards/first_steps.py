"""Checks the user's code in the first steps of a training.

Findings are warnings, and lower the level where the run cannot keep its promise.
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
    """Yield the batches, and check model, recipe, schedule and optimizers with the first three.

    A finding is printed, and lowers the run's level, since it cannot be resumed to the same bits.
    """
    warned = False
    for first in islice(batches, 1):
        _warn(run, [*find(run, first), *find_in_schedule(run)])
        warned = _warn_of_changed_parameters(run, first)
        own = run.strategy.compiles and (is_own(run.recipe) or is_own(run.model))
        with untrained(run) if own else nullcontext(list[Problem]()) as idle:
            yield first  # the step
        for problem in idle:
            tell(run, problem)
    # After the first step, since many optimizers create their state in it
    before = state_of_optimizers(run)
    for second in islice(batches, 1):
        # Again: before the first step, averaging weights with their initial copy changed nothing
        if not warned:
            _warn_of_changed_parameters(run, second)
        yield second
    _warn(run, changed_in_optimizers(run, before))
    yield from batches


@contextmanager
def untrained(run: Run) -> Generator[list[Problem]]:
    """Watch a step; afterwards the list has a warning if parameters got no gradient in it."""
    problems, reached = list[Problem](), set[nn.Parameter]()
    # The first entry has all parameters that wait, however long
    waiting = {
        id(x) for phase in run.phases for later in phase.waiting[:1] for x in later.parameters
    }
    trained = {
        name: x
        for name, x in run.model.named_parameters()
        if x.requires_grad and id(x) not in waiting
    }
    hooks = [x.register_post_accumulate_grad_hook(reached.add) for x in trained.values()]
    try:
        yield problems
    finally:
        for hook in hooks:
            hook.remove()
    if idle := [name for name, x in trained.items() if x not in reached]:
        message = (
            f"nothing trains {first_few(idle, 3)}: no phase's loss gave a gradient in the "
            "first step"
        )
        problems.append(
            Problem(
                "model",
                message,
                hint="train them in a phase, or freeze them: initialise.frozen=[NAMES]",
            )
        )


def _warn_of_changed_parameters(run: Run, micro_batches: Sequence[MicroBatch]) -> bool:
    """Warn of changed parameters; return whether any process found some."""
    for problem, level in (problems := find_changed_parameters(run, micro_batches)):
        _warn(run, [problem], level)
    return bool(problems)


def _warn(run: Run, problems: Sequence[Problem], level: str = "none") -> None:
    if problems:
        run.recorder.level = level = min(run.recorder.level, level, key=[*LEVELS].index)
        # The folder has its record by now, with the level before this finding
        if run.strategy.peers.is_main and (
            record := read_json(run.folder.environment, shapes.ENVIRONMENT)
        ):
            write_json(run.folder.environment, {**record, "level": level})
    for problem in problems:
        tell(run, problem)


_FACTOR = 1000
"""The factor on parameters, a little larger for each: it exceeds limits, and separates copies."""


def find_changed_parameters(
    run: Run, micro_batches: Sequence[MicroBatch]
) -> list[tuple[Problem, str]]:
    """Find out whether a forward pass changes parameters, if there are several replicas.

    Returns:
        A warning, and the level that the run can still promise; or nothing.
    """
    if run.config.replicas == 1 or not may_look(run):
        return []
    changed = (try_out(run, micro_batches[0], _changed_parameters) or {}) if micro_batches else {}
    everyone = [x for x in run.strategy.peers.gather(changed) if x]
    if not everyone:
        return []
    differ = any(x != everyone[0] for x in everyone)
    message = (
        f"a forward pass changes parameters ({first_few([*everyone[0]], 3)}), once for each "
        "replica that a process has"
    )
    message += (
        "; here each process changes them in another way, so they differ between processes"
        if differ
        else ": with another number of processes, they get other values"
    )
    hint = (
        "replicas=1; or keep what no optimizer trains in buffers: all replicas of a step begin "
        "with the same ones, and replica 0's are kept"
    )
    return [(Problem("model", message, hint=hint), "none" if differ else "R1")]


def _changed_parameters(run: Run, micro: MicroBatch) -> dict[str, int]:
    """Return the parameters that computing a micro-batch's losses changes.

    Each has a digest of the value that it gets from other weights.
    """
    saved = copy_of_state(run)
    parameters = {
        name: parameter for name, parameter in run.model.named_parameters() if name in saved
    }

    # Torch counts changes in place, even those that change no value yet. A change of
    # `parameter.data` shows in its address or its values.
    try:
        before = {name: mark(parameter) for name, parameter in parameters.items()}
        _ = [*losses_of(run, micro)]
        changed = [
            name
            for name, parameter in parameters.items()
            if before[name] != mark(parameter) or not same_values(parameter.detach(), saved[name])
        ]
        if changed:
            run.model.load_state_dict(saved)
            with torch.no_grad():
                for number, parameter in enumerate(parameters.values()):
                    parameter.mul_(_FACTOR + number)
            with suppress(Exception):  # some models do not compute with such weights
                _ = [*losses_of(run, micro)]
        return {name: value_digest(parameters[name].detach()) for name in changed}
    finally:
        run.model.load_state_dict(saved)
