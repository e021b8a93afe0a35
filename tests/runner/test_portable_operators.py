"""Under `reproducibility=portable` square roots are rounded correctly, images are sampled by a scalar kernel, and large products and GRUs are accurate."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from samewise.runner.training.same_bits import determinism, portable_operators
from samewise.runner.training.same_bits.determinism import fresh_torch_state
from samewise.runner.training.same_bits.portable_operators import use_portable_operators

SWITCHES = {"threads": 1, "deterministic": True, "benchmark": False, "fill_uninitialized_memory": False, "detect_anomaly": False}
PORTABLE = SimpleNamespace(**SWITCHES, variables={"MKL_CBWR": "COMPATIBLE"})
STRICT = SimpleNamespace(**SWITCHES, variables={})
VALUES = np.random.default_rng(0).random((100, 160)) * 1000


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    yield
    use_portable_operators(enabled=False)


def nearest(values: Tensor) -> Tensor:
    """The roots, rounded once: of float32 via float64, of float64 by NumPy, which uses the CPU's instruction."""
    return torch.from_numpy(np.sqrt(values.double().numpy())).to(values.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_root_is_the_nearest_representable_number(dtype: torch.dtype) -> None:
    determinism.apply(PORTABLE)
    values = torch.from_numpy(VALUES).to(dtype)
    roots = nearest(values)
    assert torch.equal(values.sqrt(), roots)
    assert torch.equal(values.t().sqrt(), roots.t())
    assert torch.equal(values.clone().sqrt_(), roots)
    assert torch.equal(torch.sqrt(values, out=torch.empty(0, dtype=dtype)), roots)
    assert torch.equal(torch._foreach_sqrt([values])[0], roots)


def test_images_are_sampled_by_the_scalar_kernel() -> None:
    drawn = torch.Generator().manual_seed(0)
    images, grid = torch.randn(2, 3, 8, 8, generator=drawn, requires_grad=True), torch.rand(2, 9, 9, 2, generator=drawn) * 2.2 - 1.1
    before = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    use_portable_operators(enabled=True)
    found = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    assert torch.equal(found, torch.ops.aten._grid_sampler_2d_cpu_fallback(images, grid, 0, 0, False))
    assert torch.allclose(found, before, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), images)
    assert torch.allclose(gradient, torch.autograd.grad(before.sum(), images)[0], atol=1e-5)


def gradients(function: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
    """The function's result, and the gradients of a weighted sum of it with respect to all inputs."""
    leaves = [one.detach().requires_grad_() for one in given]
    found = function(*leaves)
    return [found, *torch.autograd.grad((found * torch.linspace(0.5, 1.5, found.numel(), dtype=found.dtype).view_as(found)).sum(), leaves)]


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "matrices": (torch.mm, [(100, 160), (160, 120)]),
    "strided": (lambda left, right: left.t()[:, ::2] @ right[::2, 1:], [(160, 200), (160, 151)]),
    "a row repeated": (lambda left, right: left.expand(150, 160) @ right, [(1, 160), (160, 120)]),
    "linear": (torch.nn.functional.linear, [(2, 90, 160), (120, 160), (120,)]),
    "a batch": (torch.bmm, [(3, 100, 160), (3, 160, 120)]),
    "a convolution of 1 by 1": (torch.nn.functional.conv1d, [(4, 32, 372), (128, 32, 1), (128,)]),
    "the same without bias, seen otherwise": (lambda values, weight: torch.conv2d(values.transpose(2, 3), weight), [(3, 64, 31, 17), (64, 64, 1, 1)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_large_products_are_accurate_and_repeat(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, shapes = PRODUCTS[name]
    drawn = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=drawn) for shape in shapes]
    exact = gradients(function, *(one.double() for one in given))
    plain = gradients(function, *given)
    calls = list[int]()
    product = portable_operators._product
    monkeypatch.setattr(portable_operators, "_product", lambda *given: (calls.append(1), product(*given))[1])
    use_portable_operators(enabled=True)
    found = gradients(function, *given)
    assert calls
    for one, true, torch_s in zip(found, exact, plain, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (torch_s.dtype, torch_s.shape, torch_s.stride())
        assert (one - true).abs().max() <= 1e-5 * true.abs().max()
    assert all(map(torch.equal, found, gradients(function, *given)))


@pytest.mark.parametrize("settings", [{}, {"batch_first": True, "num_layers": 2}, {"num_layers": 3, "dropout": 0.5}, {"bidirectional": True}, {"bias": False}])
def test_a_gru_agrees_with_torchs_up_to_rounding(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = torch.nn.GRU(5, 7, **settings)
    first = torch.randn(model.num_layers * (2 if model.bidirectional else 1), 4, 7)
    values = torch.randn(4, 4, 5)

    def whole(values: Tensor, first: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(1)
        named = dict(zip(dict(model.named_parameters()), parameters, strict=True))
        found, last = torch.func.functional_call(model, named, (values, first))
        return torch.cat([found.flatten(), last.flatten()])

    before = gradients(whole, values, first, *model.parameters())
    use_portable_operators(enabled=True)
    after = gradients(whole, values, first, *model.parameters())
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    if not (model.bidirectional or not model.bias):
        assert not all(map(torch.equal, after, before))
    with torch.no_grad():
        assert torch.equal(whole(values, first, *model.parameters()), after[0])


def test_other_experiments_and_notebooks_keep_their_bits() -> None:
    values = torch.from_numpy(VALUES).float()
    before = values.sqrt()
    determinism.apply(PORTABLE)
    determinism.apply(STRICT)
    assert torch.equal(values.sqrt(), before)
    with fresh_torch_state():
        determinism.apply(PORTABLE)
        assert torch.equal(values.sqrt(), nearest(values))
    assert torch.equal(values.sqrt(), before)
