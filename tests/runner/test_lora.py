"""LoRA: only a low-rank change is learned, which starts at zero; everything else stays."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samewise.runner.errors import ConfigError
from samewise.runner.optim.groups import parameter_groups
from samewise.runner.optim.initialise import initialise

CONFIGS = Path(__file__).parents[2] / "configs"


def lora(match: str, **settings: Any) -> dict[str, Any]:
    return {"parametrisations": {"lora": {"match": match, "kind": "lora", **settings}}}


def test_steps_match_the_two_small_matrices_written_out() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3)).double()
    images, before = torch.randn(5, 2, 3, 3, dtype=torch.float64), copy.deepcopy(model)
    initialise(model, lora("*.weight", rank=2, alpha=6))
    assert torch.equal(model(images), before(images))
    trained = {name: parameter for name, parameter in model.named_parameters() if "lora" in name}
    weights = {place: before[place].weight.detach() for place in (0, 2)}
    by_hand = {name: value.detach().clone().requires_grad_() for name, value in trained.items()}

    def written_out() -> torch.Tensor:
        made = {
            place: weight
            + 3.0 * (by_hand[f"{place}.parametrizations.weight.0.lora_up"] @ by_hand[f"{place}.parametrizations.weight.0.lora_down"]).reshape(weight.shape)
            for place, weight in weights.items()
        }
        return nn.functional.linear(nn.functional.conv2d(images, made[0], before[0].bias).flatten(1), made[2], before[2].bias)

    groups = parameter_groups(model, {"rest": {"match": ["*.bias"], "frozen": True}})
    optimizer = torch.optim.SGD([parameter for group in groups for _, parameter in group["params"]], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
        gradients = torch.autograd.grad(written_out().square().sum(), list(by_hand.values()))
        with torch.no_grad():
            for value, gradient in zip(by_hand.values(), gradients, strict=True):
                value -= 0.1 * gradient
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(trained)
    assert all(torch.allclose(trained[name], by_hand[name], rtol=1e-9, atol=0) for name in trained)
    assert not torch.allclose(model(images), before(images))


@pytest.mark.parametrize(
    ("match", "rank", "message"), [("0.weight", 9, "rank of 9 is not valid: it must be from 1 to 4"), ("1.weight", 2, "it is not a matrix")]
)
def test_a_weight_that_lora_cannot_change_is_reported(match: str, rank: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        initialise(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), lora(match, rank=rank))
