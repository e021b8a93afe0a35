"""Under `reproducibility=portable` square roots are rounded correctly, which MKL's are not, and images sampled by a kernel that every CPU runs alike."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from samewise.runner.training import determinism
from samewise.runner.training.portable import use_portable_operators
from samewise.runner.training.undisturbed import undisturbed

SWITCHES = {"threads": 1, "deterministic": True, "benchmark": False, "fill_uninitialized_memory": False}
PORTABLE = SimpleNamespace(**SWITCHES, variables={"MKL_CBWR": "COMPATIBLE"})
STRICT = SimpleNamespace(**SWITCHES, variables={})
VALUES = np.random.default_rng(0).random((100, 160)) * 1000


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    yield
    use_portable_operators(wanted=False)


def nearest(values: Tensor) -> Tensor:
    """The roots, rounded once: of float32 by way of float64, of float64 by NumPy, whose instruction does it."""
    return torch.from_numpy(np.sqrt(values.double().numpy())).to(values.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_root_is_the_nearest_number(dtype: torch.dtype) -> None:
    determinism.apply(PORTABLE)
    values = torch.from_numpy(VALUES).to(dtype)
    roots = nearest(values)
    assert torch.equal(values.sqrt(), roots)
    assert torch.equal(values.t().sqrt(), roots.t())
    assert torch.equal(values.clone().sqrt_(), roots)
    assert torch.equal(torch.sqrt(values, out=torch.empty(0, dtype=dtype)), roots)
    assert torch.equal(torch._foreach_sqrt([values])[0], roots)


def test_what_is_not_a_positive_number_has_torch_s_root() -> None:
    values = [
        torch.tensor(4.0),
        torch.tensor([4, 9]),
        torch.tensor([-1.0, 0.0, -0.0, torch.inf, torch.nan]),
        torch.tensor([2.0], dtype=torch.bfloat16),
        torch.empty(0),
    ]
    values += [torch.tensor([-4 + 0j]).conj(), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    before = [value.sqrt() for value in values]
    use_portable_operators(wanted=True)
    for value, root in zip(values, before, strict=True):
        found = value.sqrt()
        assert (found.dtype, found.shape, found.stride()) == (root.dtype, root.shape, root.stride())
        assert torch.equal(found.nan_to_num(-5), root.nan_to_num(-5)), value


def test_images_are_sampled_by_the_scalar_kernel() -> None:
    drawn = torch.Generator().manual_seed(0)
    images, grid = torch.randn(2, 3, 8, 8, generator=drawn, requires_grad=True), torch.rand(2, 9, 9, 2, generator=drawn) * 2.2 - 1.1
    before = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    use_portable_operators(wanted=True)
    found = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    assert torch.equal(found, torch.ops.aten._grid_sampler_2d_cpu_fallback(images, grid, 0, 0, False))
    assert torch.allclose(found, before, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), images)
    assert torch.allclose(gradient, torch.autograd.grad(before.sum(), images)[0], atol=1e-5)


def test_gradients_pass_through() -> None:
    values = torch.from_numpy(VALUES[:1]).requires_grad_()
    use_portable_operators(wanted=True)
    values.sqrt().sum().backward()
    assert torch.equal(values.grad, 1 / (2 * nearest(values.detach())))


def test_other_experiments_keep_their_bits_and_so_does_a_notebook() -> None:
    values = torch.from_numpy(VALUES).float()
    before = values.sqrt()
    determinism.apply(PORTABLE)
    determinism.apply(STRICT)
    assert torch.equal(values.sqrt(), before)
    with undisturbed():
        determinism.apply(PORTABLE)
        assert torch.equal(values.sqrt(), nearest(values))
    assert torch.equal(values.sqrt(), before)
