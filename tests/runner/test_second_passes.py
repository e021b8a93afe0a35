"""What strategy=fsdp refuses in a backward pass. One rank of two, the other simulated."""

from collections.abc import Generator

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("shard", [[], ["0"]], ids=["the model", "a unit"])
def test_a_gradient_of_a_gradient_through_a_unit_is_refused(shard: list[str]) -> None:
    value = VALUE.clone().requires_grad_()
    total = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), shard)(value).sum()
    with pytest.raises(ConfigError, match="differentiates a gradient") as caught:
        torch.autograd.grad(total, value, create_graph=True)
    assert "'Sequential'" in str(caught.value), "the first that it passes through"
