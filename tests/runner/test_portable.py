"""`reproducibility=portable` on other CPUs: those that qemu-user emulates (Debian's package), and this one with fewer instructions."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from samewise_runner_portable_runs import COMMON, EXPERIMENTS
from torch import Tensor

from samewise.runner.config import compose, project
from samewise.runner.config.fingerprint import targets
from samewise.runner.training.same_bits import determinism, portable_operators
from samewise.runner.training.same_bits.determinism import fresh_torch_state
from samewise.runner.training.same_bits.portable import COMPUTING, TESTED
from samewise.runner.training.same_bits.portable_operators import use_portable_operators

FEWER = {
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD,-FMA",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
    "OPENBLAS_CORETYPE": "Haswell",
}
"""Hides instructions from the libraries that `portable` does not restrict by itself."""
emulated = pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
x86 = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="this is no x86-64-v3 CPU")

COMPUTES = """\
import hashlib, types
from samewise.runner.config import compose, project
from samewise.runner.processes import variables
from samewise.runner.training.same_bits import determinism
settings = compose.compose(["reproducibility=portable", "model=resnet18_small", "dataset=digits"], project=project.find()).cfg.reproducibility
variables.prepare(settings)
import torch
determinism.apply(settings)
say = lambda name, found: print(name, hashlib.sha256(found.detach().contiguous().numpy().tobytes()).hexdigest())
torch.manual_seed(0)
values = torch.randn(4, 4000)
for name in ("sqrt", "rsqrt", "log", "log1p", "exp", "sin", "cos", "tanh", "erf", "sigmoid", "reciprocal"):
    say(name, getattr(torch, name)(values.abs()))
say("sampled", torch.nn.functional.grid_sample(values[:, :768].view(4, 3, 16, 16), values[:, :512].view(4, 16, 16, 2), align_corners=False))
say("fft", torch.view_as_real(torch.fft.rfft(values[:, :512])))
say("product", values[:, :400] @ values[:, :400].t())
left, right = values.view(100, 160), torch.randn(160, 120)
say("large product", left @ right)
say("large product of views", right[:100].t() @ left[:, :150])
say("with a bias", torch.nn.functional.linear(left, right.t(), right[0]))
say("in a batch", left.expand(3, 100, 160) @ torch.randn(3, 160, 120))
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
model(values[0, :768].view(4, 3, 8, 8)).square().mean().backward()
recurrent, pointwise = torch.nn.GRU(40, 128, batch_first=True), torch.nn.Conv1d(32, 128, 1)
recurrent(values.view(4, 100, 40))[0].square().mean().backward()
pointwise(values[:, :3968].view(4, 32, 124).repeat(1, 1, 3)).square().mean().backward()
for module in (model, recurrent, pointwise):
    for name, parameter in module.named_parameters():
        say(name, parameter.grad)
"""


def output_on(*emulator: str, code: tuple[str, ...] = ("-c", COMPUTES), **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([*emulator, sys.executable, *code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_on(folder: Path, names: list[str], *emulator: str, **variables: str) -> list[str]:
    """Train some experiments there; returns the digests of their traces."""
    program = str(Path(__file__).with_name("portable_runs.py"))
    said = output_on(*emulator, code=(program, str(folder), *names), **variables)
    return [line for line in said.splitlines() if line.startswith("DIGEST")]


def test_the_list_of_tested_components_matches_the_tested_experiments() -> None:
    wholes = [compose.compose([*COMMON, *given], project=project.find()).whole for given in EXPERIMENTS.values()]
    assert {name for whole in wholes for name in targets({section: whole[section] for section in COMPUTING})} == TESTED


@pytest.mark.slow
@x86
@pytest.mark.timeout(900)
def test_each_recipe_gives_the_same_bits_with_fewer_instructions(tmp_path: Path) -> None:
    here = train_on(tmp_path / "all", [*EXPERIMENTS])
    assert len(here) == len(EXPERIMENTS)
    assert train_on(tmp_path / "fewer", [*EXPERIMENTS], **FEWER) == here
    assert {json.loads(path.read_text())["level"] for path in tmp_path.glob("*/*/*/*/summary.json")} == {"R3"}


@pytest.mark.slow
@pytest.mark.long
@x86
def test_without_portable_other_instructions_give_other_bits(tmp_path: Path) -> None:
    strict = "resnet,reproducibility=strict"
    other = train_on(tmp_path / "fewer", [strict], ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")
    assert train_on(tmp_path / "all", [strict]) != other


@pytest.mark.slow
@pytest.mark.long
@emulated
@x86
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cpu", ["Haswell", "EPYC"])
def test_each_recipe_gives_the_same_bits_on_another_cpu(cpu: str, tmp_path: Path) -> None:
    here = train_on(tmp_path / "here", [*EXPERIMENTS])
    assert train_on(tmp_path / cpu, [*EXPERIMENTS], "qemu-x86_64", "-cpu", cpu) == here


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
