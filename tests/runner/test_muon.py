"""Muon for weights of any dimensions, with SGD beside it: against torch's optimizers, the iteration against singular values in float64."""

from typing import Any

import pytest
import torch
from torch import nn

from samewise.runner.optim.muon import COEFFICIENTS, Muon, orthogonalise


def random_weights(*shape: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def take_steps(optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    """Take steps with the same gradients for every optimizer."""
    for step in range(steps):
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                parameter.grad = random_weights(*parameter.shape, seed=100 * step + place).detach() + parameter.detach()
        optimizer.step()


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (8, 8)])
def test_the_iteration_only_changes_singular_values_by_its_polynomial(shape: tuple[int, int]) -> None:
    matrix = random_weights(*shape).detach()
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / matrix.double().norm()
    a, b, c = COEFFICIENTS
    for _ in range(3):
        values = a * values + b * values**3 + c * values**5
    expected = left @ torch.diag(values) @ right
    assert torch.allclose(orthogonalise(matrix, steps=3).double(), expected, atol=0.03)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (64, 576)])
def test_the_iteration_has_the_bits_of_torchs(shape: tuple[int, int]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = random_weights(*shape).detach()
    assert torch.equal(orthogonalise(matrix, steps=5, eps=0.0), _zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7))


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_wide_matrix_is_trained_like_torchs_muon(nesterov: bool) -> None:
    mine, torchs = random_weights(6, 20), random_weights(6, 20)
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "ns_steps": 5}
    take_steps(Muon([mine], **options))
    take_steps(torch.optim.Muon([torchs], **options))
    moved = (torchs - random_weights(6, 20)).abs().max()
    assert (mine - torchs).abs().max() < 0.05 * moved  # the iteration is in bfloat16


def test_a_convolution_is_trained_as_a_matrix() -> None:
    convolution, matrix = random_weights(6, 3, 3, 3), nn.Parameter(random_weights(6, 3, 3, 3).detach().view(6, 27))
    for one in (convolution, matrix):
        optimizer = Muon([one], normalize_weights=True)
        one.grad = random_weights(6, 3, 3, 3, seed=9).detach().view(one.shape)
        optimizer.step()
    assert torch.equal(convolution.view(6, 27), matrix)


@pytest.mark.parametrize("momentum", [0.0, 0.85])
def test_a_group_without_muon_has_the_bits_of_torchs_sgd(momentum: float) -> None:
    mine, torchs = [random_weights(7), random_weights(4, 3)], [random_weights(7), random_weights(4, 3)]
    options: dict[str, Any] = {"lr": 0.3, "momentum": momentum, "nesterov": momentum > 0, "weight_decay": 0.02}
    take_steps(Muon([{"params": mine, "use_muon": False, **options}]))
    take_steps(torch.optim.SGD(torchs, **options, foreach=False))
    assert all(torch.equal(one, other) for one, other in zip(mine, torchs, strict=True))


def test_muon_resumes_from_its_state() -> None:
    weights = [[random_weights(6, 20), random_weights(7)], [random_weights(6, 20), random_weights(7)]]
    whole, half = (Muon([{"params": pair[:1]}, {"params": pair[1:], "use_muon": False}]) for pair in weights)
    take_steps(whole, 6)
    take_steps(half, 3)
    rest = Muon([{"params": weights[1][:1]}, {"params": weights[1][1:], "use_muon": False}])
    rest.load_state_dict(half.state_dict())
    for step in range(3, 6):
        for group in rest.param_groups:
            for place, parameter in enumerate(group["params"]):
                parameter.grad = random_weights(*parameter.shape, seed=100 * step + place).detach() + parameter.detach()
        rest.step()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"momentum": 1.0}, {"momentum": 0.0}, {"weight_decay": -0.1}, {"ns_steps": 0}, {"ns_coefficients": [1.0]}])
def test_an_option_out_of_its_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Muon([random_weights(3, 2)], **wrong)
