"""Finds, by trial, optimizers that look at all of their parameters together, as one that divides by the norm of all gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

STEPS = 3


def depends_on_others(optimizer: Optimizer, settings: Mapping[str, Any]) -> bool:
    """Whether a new optimizer of this class updates a parameter otherwise if it has others too. False if it cannot be tried.

    It is tried with a few small parameters, and with each of them alone, in float64, so that rounding does not matter. torch's generator is seeded for it.

    Args:
        optimizer: Its class is tried, with its groups.
        settings: The other arguments of its constructor.
    """
    small = list[tuple[int, Tensor]]()  # the number of a group, and a value
    for number, group in enumerate(optimizer.param_groups):
        for ndim in sorted({parameter.ndim for parameter in group["params"]}):
            device = group["params"][0].device
            small += [(number, torch.ones([2 + more] * ndim, dtype=torch.float64, device=device)) for more in range(2)]
    places = range(len(small))
    try:
        together = _updates(optimizer, settings, small, places)
        return any(not torch.allclose(_updates(optimizer, settings, small, [place])[place], together[place], rtol=1e-6, atol=0) for place in places)
    except Exception:  # one that takes no such parameters: its own first step will tell
        return False


def _updates(optimizer: Optimizer, settings: Mapping[str, Any], small: list[tuple[int, Tensor]], chosen: Collection[int]) -> dict[int, Tensor]:
    """By how much a few steps change some of the values."""
    parameters = {place: nn.Parameter(small[place][1].clone()) for place in chosen}
    groups = list[dict[str, Any]]()
    for number, group in enumerate(optimizer.param_groups):
        held = [parameter for place, parameter in parameters.items() if small[place][0] == number]
        groups += [{**{key: value for key, value in group.items() if key not in ("params", "param_names")}, "params": held}] if held else []
    torch.manual_seed(0)
    tried: Any = type(optimizer)(groups, **settings)
    for step in range(STEPS):
        for place, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, 0.5 + place) + 0.25 * (-1) ** step * torch.ones_like(parameter).cumsum(0 if parameter.ndim else -1)
        tried.step()
    return {place: parameter.detach() - small[place][1] for place, parameter in parameters.items()}
