"""A small network, and weights of another. Tests import this as `samewise_runner_initialised`."""

from typing import Any

import torch
from torch import nn

from samewise.runner.data import streams


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))


def other_weights(seed: int = 5) -> dict[str, torch.Tensor]:
    with streams.scope(seed, "init"):
        return {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in network().state_dict().items()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
