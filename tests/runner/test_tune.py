"""`samewise tune` finds values that are known beforehand, and leaves no run behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.errors import TrainingError
from samewise.runner.measuring import batch_size

LAB = """
import torch
from torch import nn
from samewise.runner.interfaces import Loss, Recipe, Scores

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return {"at": torch.tensor(float(index))}

class Bowl(nn.Module):
    # L/2 w^2, whose gradient descent is stable below a learning rate of 2/L
    def __init__(self, *, curvature, bottom=0.0):
        super().__init__()
        self.curvature, self.bottom, self.weights = curvature, bottom, nn.Parameter(torch.full((3,), 2.0))

    def forward(self):
        return 0.5 * self.curvature * (self.weights**2).sum() + self.bottom

class Hungry(nn.Module):
    # so much for each sample, held for the backward pass; or an allocation that no machine grants, from a batch size on
    def __init__(self, *, bytes_each=0, refuses_from=1000):
        super().__init__()
        self.weights, self.bytes_each, self.refuses_from = nn.Parameter(torch.ones(1)), bytes_each, refuses_from

    def forward(self, at):
        if len(at) >= self.refuses_from:
            torch.empty(2**50)
        wide = at[:, None].expand(-1, max(1, self.bytes_each // 4)) + 0.0
        return (wide * self.weights).mean()

class Down(Recipe):
    def loss(self, model, batch, phase):
        value = model() if isinstance(model, Bowl) else model(batch["at"])
        return Loss(value * len(batch["at"]), len(batch["at"]))

    def measure(self, model, batch):
        return len(batch["at"])

    def scores(self, dataset):
        return Counted()

class Counted(Scores):
    def add(self, measured):
        pass

    def compute(self):
        return {"loss": 0.0}
"""
SMALL = [
    *(
        "device=cpu",
        "transforms=none",
        "tracking=none",
        "evaluate.pictures=false",
        "callbacks=none",
        "name=tuned",
        "trace.every_steps=0",
        "max_epochs=1",
        "batch_size=8",
    ),
    *("~recipe", "+recipe={_target_: lab_of_tuning.Down}", "~model", "+model={_target_: lab_of_tuning.Bowl, curvature: 8}"),
    *("~dataset", "+dataset={train: {_target_: lab_of_tuning.Points}, valid: {_target_: lab_of_tuning.Points}}"),
    *("optimizer.momentum=0", "optimizer.lr=0.5"),
]
HUNGRY = [*SMALL, "~model.curvature", "model._target_=lab_of_tuning.Hungry"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the classes above; commands are given in it."""
    (tmp_path / "lab_of_tuning.py").write_text(LAB)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab_of_tuning"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_range_test_finds_the_edge_of_stability_of_a_bowl(here: Path, samewise: Callable[..., Any]) -> None:
    edge = 2 / 8
    done = samewise("tune", "lr", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert edge / 1.3 <= found["lowest"] <= edge * 1.3
    assert edge < found["rises"] <= found["diverges"] < 5 * edge
    assert edge / 100 < found["settings"]["optimizer.lr"] < edge / 2, "training at it is stable, and gets somewhere"
    loss, weight = list[float](), 2.0
    for rate, _ in found["curve"]:  # the same, by hand
        loss.append(3 * 0.5 * 8 * weight**2)
        weight -= rate * 3 * 8 * weight / 3
    known = [(one, other) for one, (_, other) in zip(loss, found["curve"], strict=True) if other is not None and one > 1e-30]
    assert all(one == pytest.approx(other, rel=1e-3) for one, other in known)
    assert (Path(found["folder"]) / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("+param_groups.all={match: weights, lr: 0.1}", "optimizer.lr: has no effect: every parameter group has an lr of its own"),
        ("scheduler=one_cycle scheduler.cycle_momentum=false scheduler.max_lr=0.1", "scheduler.max_lr: decides the learning rate in place of optimizer.lr"),
    ],
)
def test_a_range_test_whose_result_would_do_nothing_is_refused(here: Path, samewise: Callable[..., Any], given: str, told: str) -> None:
    done = samewise("tune", "lr", *SMALL, *(given.split() if given.startswith("scheduler") else [given]))
    assert done.returncode == 2
    assert told in done.stderr


def test_only_full_batches_are_measured(here: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen, steps = set[tuple[int, int]](), batch_size.RepeatedRun.steps

    def noting(self: batch_size.RepeatedRun, count: int, **others: Any) -> Any:
        for outcome, seconds in steps(self, count, **others):
            seen.add((others["batch_size"], outcome.samples))
            yield outcome, seconds

    monkeypatch.setattr(batch_size.RepeatedRun, "steps", noting)
    assert samewise("tune", "batch_size", *HUNGRY, "loader.drop_last=false", "--steps", 2, "--largest", "--json").returncode == 0
    assert seen == {(size, size) for size in (8, 16, 32, 64)}, "of 96 samples, the second step of 64 would have 32"


def test_the_smallest_of_equally_fast_batch_sizes_is_suggested() -> None:
    sizes = [batch_size.Size(8, 8.0), batch_size.Size(16, 8.0), batch_size.Size(32, 15.9), batch_size.Size(64, 33.0), batch_size.Size(128, why="no")]
    found = batch_size.suggest(sizes, samples=100)
    assert "here 6 steps an epoch of 100; the largest that fits is 64" in found["reason"]
    assert "here 1 step an epoch of 30; twice as many are more than the training split has" in batch_size.suggest(sizes[:2], samples=30)["reason"]
    assert (found["batch_size"], found["fastest"], found["largest"], found["is_largest"]) == (16, 32, 64, True)
    assert found["samples_per_s"] == pytest.approx(2000)
    with pytest.raises(TrainingError, match="no batch fits"):
        batch_size.suggest([batch_size.Size(8, why="no")], samples=100)


LIMITED = """
import resource, sys
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.measuring import batch_size
from samewise.runner.measuring.profile import rehearse
from pathlib import Path

with rehearse(compose(sys.argv[1:], project=Project(Path.cwd(), ("lab_of_tuning",)))) as run:
    list(batch_size.RepeatedRun(run).steps(2))
    has = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize:"))) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (has + 400 * 2**20,) * 2)
    tried = batch_size.find(run, steps=1, largest=True, memory=None, report=lambda size: None)
    found = batch_size.suggest(tried, samples=96)
print(found["largest"], found["is_largest"])
"""


@pytest.mark.slow
def test_the_largest_batch_under_a_memory_limit_is_found(here: Path) -> None:
    each = 8 * 2**20  # and as much again for its product with the weights, and for the gradients of both
    command = [sys.executable, "-c", LIMITED, *HUNGRY, f"+model.bytes_each={each}"]
    # One heap: threads that wait for each other's would reserve 64 MiB each of what the limit leaves, more of them on a busy machine.
    variables = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{here}", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    largest, is_largest = done.stdout.split()
    assert is_largest == "True"
    assert 400 // 8 // 5 <= int(largest) <= 400 // 8 // 2, "between five and two times its samples' memory"
