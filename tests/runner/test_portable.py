"""Operators under `reproducibility=portable` on another CPU, which qemu-user emulates (Debian's package qemu-user)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

COMPUTES = """\
import hashlib, types
from samewise.runner.config import compose, project
from samewise.runner.training import determinism
settings = compose.compose(["reproducibility=portable", "model=resnet18_small", "dataset=digits"], project=project.find()).cfg.reproducibility
determinism.prepare(settings)
import torch
determinism.apply(settings)
say = lambda name, found: print(name, hashlib.sha256(found.detach().contiguous().numpy().tobytes()).hexdigest())
torch.manual_seed(0)
values = torch.randn(4, 4000)
for name in ("sqrt", "rsqrt", "log", "log1p", "exp", "sin", "cos", "tanh", "erf", "sigmoid", "reciprocal"):
    say(name, getattr(torch, name)(values.abs()))
say("fft", torch.view_as_real(torch.fft.rfft(values[:, :512])))
say("product", values[:, :400] @ values[:, :400].t())
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4))
model(values[0, :768].view(4, 3, 8, 8)).square().mean().backward()
for name, parameter in model.named_parameters():
    say(name, parameter.grad)
"""


def said_on(*emulator: str) -> str:
    done = subprocess.run([*emulator, sys.executable, "-c", COMPUTES], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cpu", ["Haswell", "EPYC"])
def test_operators_give_the_same_bits_on_another_cpu(cpu: str) -> None:
    here = said_on()
    assert here.count("\n") >= 19
    assert said_on("qemu-x86_64", "-cpu", cpu) == here
