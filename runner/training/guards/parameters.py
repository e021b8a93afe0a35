"""Finds parameters that nothing trains, and those that a forward pass changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, first_few
from samewise.runner.records.digest import value_digest
from samewise.runner.strategies.recompute import mark
from samewise.runner.training.guards.hidden_state import (
    copy_of_state,
    may_look,
    same_values,
    try_out,
)
from samewise.runner.training.losses import losses_of
from samewise.runner.training.run import Caution, Guard, Run


@final
class UntrainedParameters(Guard):
    """Finds parameters that get no gradient in the first step."""

    def __init__(self, run: Run) -> None:
        self._reached = set[nn.Parameter]()
        self._hooks = list[RemovableHandle]()
        self._is_first = run.strategy.compiles

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        if self._is_first:
            hooks = [x.register_post_accumulate_grad_hook for x in _trained(run).values()]
            self._hooks = [hook(self._reached.add) for hook in hooks]
        return ()

    def after_step(self, run: Run) -> Iterable[Caution]:
        for hook in self._hooks:
            hook.remove()
        trained = _trained(run) if self._is_first else {}
        self._hooks, self._is_first = [], False
        if idle := [name for name, x in trained.items() if x not in self._reached]:
            message = (
                f"nothing trains {first_few(idle, 3)}: no phase's loss gave a gradient in the "
                "first step"
            )
            hint = "train them in a phase, or freeze them: initialise.frozen=[NAMES]"
            yield Caution(Problem("model", message, hint=hint))


def _trained(run: Run) -> dict[str, nn.Parameter]:
    """Return the parameters that the first step trains, by name."""
    # The first entry has all parameters that wait, however long
    waiting = {
        id(x) for phase in run.phases for later in phase.waiting[:1] for x in later.parameters
    }
    return {
        name: x
        for name, x in run.model.named_parameters()
        if x.requires_grad and id(x) not in waiting
    }


@final
class ChangedParameters(Guard):
    """Finds parameters that a forward pass changes, if there are several replicas.

    It looks before the first two steps: before the first, averaging weights with their initial
    copy changes nothing.
    """

    _looks = 2

    def before_step(self, run: Run, micro_batches: Sequence[MicroBatch]) -> Iterable[Caution]:
        if not self._looks or run.config.replicas == 1 or not may_look(run):
            return
        changed = try_out(run, micro_batches[0], _changed_parameters) if micro_batches else None
        everyone = [x for x in run.strategy.peers.gather(changed or {}) if x]
        self._looks = 0 if everyone else self._looks - 1
        if not everyone:
            return
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
            "replicas=1; or keep what no optimizer trains in buffers: all replicas of a step "
            "begin with the same ones, and replica 0's are kept"
        )
        yield Caution(Problem("model", message, hint=hint), "none" if differ else "R1")


_FACTOR = 1000
"""The factor on parameters, a little larger for each: it exceeds limits, and separates copies."""


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
