"""Shared by tests of optimizers: a small network, and optimizers built for it as a config's are."""

import functools
from typing import Any

import torch
from torch import nn

from samewise.runner.config.instantiate import instantiate
from samewise.runner.interfaces import Phase
from samewise.runner.optim.build import build_optimizers

make = functools.partial(instantiate, allowed=("torch.optim", "torch.nn", "samewise.runner.optim.muon"))


def build(node: dict[str, Any], model: nn.Module, rules: dict[str, Any] | None = None, phases: tuple[Phase, ...] = (Phase(),)) -> dict[str, Any]:
    return build_optimizers(node, rules, model, phases, instantiate=make)


def network(*, matrices: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        if matrices
        else nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    )


def sgd(**settings: Any) -> dict[str, Any]:
    return {"_target_": "torch.optim.SGD", "lr": 0.1, **settings}
