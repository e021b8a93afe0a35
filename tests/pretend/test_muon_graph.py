"""Muon's iterations as a CUDA graph: the bits of the operators one by one, and fewer launches."""

import pytest
import torch
from torch import Tensor

from samewise.runner.optim import muon
from samewise.runner.optim.muon import Muon

SHAPES = [(6, 3, 3, 3), (12, 5), (5, 12), (6, 3, 3, 3)]
STEPS = 5


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def created() -> tuple[list[Tensor], Muon]:
    """Weights on the device, the last channels_last and of a second group, and their optimizer."""
    weights = [random(*shape, seed=number).cuda().requires_grad_() for number, shape in enumerate(SHAPES[:-1])]
    weights.append(random(*SHAPES[-1], seed=9).cuda().to(memory_format=torch.channels_last).requires_grad_())
    return weights, Muon([{"params": weights[:-1], "weight_decay": 0.1}, {"params": weights[-1:], "normalize_weights": True, "nesterov": False}], lr=0.05)


def take_step(weights: list[Tensor], optimizer: Muon, step: int, without: int | None = None) -> None:
    """One step with gradients that depend on its number; one weight may have none."""
    for number, weight in enumerate(weights):
        gradient = random(*weight.shape, seed=100 * step + number).cuda()
        layout = torch.channels_last if weight.ndim == 4 and not weight.is_contiguous() else torch.preserve_format
        weight.grad = None if number == without else gradient.to(memory_format=layout)
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / (step + 1)
    optimizer.step()


def trained(without_at: int | None = None) -> list[Tensor]:
    weights, optimizer = created()
    for step in range(STEPS):
        take_step(weights, optimizer, step, without=1 if step == without_at else None)
    return [weight.detach().cpu() for weight in weights]


@pytest.mark.any_cuda
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("without_at", [None, 0, 3])
def test_a_graph_has_the_bits_of_operators(without_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = trained(without_at)
    monkeypatch.setattr(muon._Graph, "LARGEST", 0)
    one_by_one = trained(without_at)
    assert all(torch.equal(one, other) for one, other in zip(replayed, one_by_one, strict=True))
    assert all(one.isfinite().all() for one in replayed)
