"""Calls an optimizer's step without torch's profiler range around it."""

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
    """Return the function that takes a step: `step`, or where possible the method that it wraps."""
    # Torch opens a profiler range around `step`, which takes longer than the update of a small
    # network even without a profiler.
    step: Any = type(optimizer).step
    pre_hooks = optimizer._optimizer_step_pre_hooks  # pyright: ignore[reportPrivateUsage]
    post_hooks = optimizer._optimizer_step_post_hooks  # pyright: ignore[reportPrivateUsage]
    is_own = not getattr(step, "hooked", False) or "step" in vars(optimizer)
    has_hooks = (
        global_optimizer_pre_hooks
        or global_optimizer_post_hooks
        or post_hooks
        or any(x is not begin_late_momentum for x in pre_hooks.values())
    )
    if is_own or has_hooks or profiler_enabled():
        return optimizer.step
    if pre_hooks:
        begin_late_momentum(optimizer)
    return partial(step.__wrapped__, optimizer)


def begin_late_momentum(optimizer: Optimizer, *_: Any) -> None:
    """Give zero momentum to parameters whose first gradient comes after the others'.

    Torch's fused SGD fails otherwise.
    """
    # With a loss scale all parameters get it: the kernel skips a first step that overflows, and
    # their momentum would be uninitialised memory.
    state = optimizer.state
    is_first = not state and getattr(optimizer, "found_inf", None) is None
    if is_first or len(state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        late = (
            [
                parameter
                for parameter in group["params"]
                if parameter.grad is not None and parameter not in state
            ]
            if group["momentum"]
            else []
        )
        # Dampening does not apply to a first gradient.
        if late and group["dampening"]:
            raise ConfigError(
                Problem(
                    "optimizer.dampening",
                    "is not supported by fused SGD with float16, or for a parameter whose first "
                    "gradient comes late",
                    hint="set optimizer.fused=false",
                )
            )
        for parameter in late:
            state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
