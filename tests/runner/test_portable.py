"""`reproducibility=portable` on other CPUs: those that qemu-user emulates (Debian's package), and this one with fewer instructions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samewise_runner_portable_runs import COMMON, EXPERIMENTS

from samewise.runner.config import compose, project
from samewise.runner.config.fingerprint import targets
from samewise.runner.training.same_bits.portable import COMPUTING, TESTED

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
