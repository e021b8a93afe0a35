"""Calls an optimizer's step without torch's profiler range around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.torch_private import (
    global_optimizer_post_hooks,
    global_optimizer_pre_hooks,
    profiler_enabled,
)


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """The function that takes a step: the optimizer's own `step`.

    Around that torch has a range for its profiler, which takes longer than the update of a small
    network, also where no profiler runs. Where none does, and nothing else is hooked to the step,
    this is the method within the range.
    """
    step: Any = type(optimizer).step
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
    is_own = not getattr(step, "hooked", False) or "step" in vars(optimizer)
    is_heard = (
        global_optimizer_pre_hooks
        or global_optimizer_post_hooks
        or after
        or any(one is not begin_late_momentum for one in before.values())
    )
    if is_own or is_heard or profiler_enabled():
        return optimizer.step
    if before:
        begin_late_momentum(optimizer)
    return partial(step.__wrapped__, optimizer)


def begin_late_momentum(optimizer: Optimizer, *_: Any) -> None:
    """Give zero momentum to parameters whose first gradient comes later than the others', since
    torch's fused SGD fails otherwise.

    With a loss scale, to all of them: if the first step overflows, the kernel skips it, and their
    momentum would be memory that nobody has written.
    """
    state = optimizer.state
    is_first = not state and getattr(optimizer, "found_inf", None) is None
    if is_first or len(state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        late = (
            [one for one in group["params"] if one.grad is not None and one not in state]
            if group["momentum"]
            else []
        )
        if late and group["dampening"]:  # dampening does not apply to a first gradient
            hint = "set optimizer.fused=false"
            words = (
                "is not supported by fused SGD with float16, or for a parameter whose first "
                "gradient comes late"
            )
            raise ConfigError(Problem("optimizer.dampening", words, hint=hint))
        for one in late:
            state[one]["momentum_buffer"] = torch.zeros_like(one)
