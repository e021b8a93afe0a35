"""What strategy=fsdp refuses in a backward pass: torch hangs there, or may add wrong gradients. One rank of two, the other simulated."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samewise.runner.errors import ConfigError
from samewise.runner.strategies.fsdp import FSDP
from samewise.runner.strategies.simulated import simulate_ranks

pytestmark = pytest.mark.fsdp
VALUE = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def _one_of_two() -> Generator[None]:
    with simulate_ranks(0, 2):
        yield


def wrap(model: nn.Module, shard: list[str]) -> nn.Module:
    strategy = FSDP(shard=shard)
    strategy.begin("cpu", 2, 1)
    return strategy.wrap(model)


class Repeats(nn.Module):
    """Calls its one layer several times, each time within a checkpoint or not."""

    def __init__(self, *calls: bool | None) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 3), calls

    def forward(self, value: Tensor) -> Tensor:
        for reentrant in self.calls:
            value = self.layer(value) if reentrant is None else checkpoint(self.layer, value, use_reentrant=reentrant)
        return value


@pytest.mark.parametrize("calls", [(True, True), (True, False), (None, True)], ids=["both", "one of two checkpoints", "one checkpoint"])
def test_a_unit_that_is_called_several_times_and_within_a_reentrant_checkpoint_is_refused(calls: tuple[bool | None, ...]) -> None:
    total = wrap(Repeats(*calls), ["layer"])(VALUE.clone().requires_grad_()).sum()
    with pytest.raises(ConfigError, match="called several times, also within a reentrant checkpoint") as caught:
        total.backward()
    assert "'layer'" in str(caught.value)


@pytest.mark.parametrize("calls", [(True,), (False, False), (None, None)], ids=["once", "not reentrant", "no checkpoint"])
def test_other_calls_of_a_unit_are_not_refused(calls: tuple[bool | None, ...]) -> None:
    model = wrap(Repeats(*calls), ["layer"])
    for _ in range(2):
        model(VALUE.clone().requires_grad_()).sum().backward()


@pytest.mark.parametrize("shard", [[], ["0"]], ids=["the model", "a unit"])
def test_a_gradient_of_a_gradient_through_a_unit_is_refused(shard: list[str]) -> None:
    value = VALUE.clone().requires_grad_()
    total = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), shard)(value).sum()
    with pytest.raises(ConfigError, match="differentiates a gradient") as caught:
        torch.autograd.grad(total, value, create_graph=True)
    assert "'Sequential'" in str(caught.value), "the first that it passes through"
