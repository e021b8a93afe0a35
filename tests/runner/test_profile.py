"""`samewise profile` finds deliberately slow parts, and leaves runs and bits unchanged."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import QUIET

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.training.guards import memory

LAB = """
import gc
import os
import signal
import time
import torch
from torch import nn

class Digits(torch.utils.data.Dataset):
    classes = [str(digit) for digit in range(10)]

    def __init__(self, *, slow=0.0):
        self.slow = slow

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.slow)
        return {"image": torch.full((1, 8, 8), index % 7 / 7), "label": index % 10}

class Crash:
    def __init__(self):
        self.circle = self

    def __del__(self):
        os.kill(os.getpid(), signal.SIGSEGV)

class Net(nn.Module):
    def __init__(self, *, slow=0.0, greedy=False):
        super().__init__()
        self.first, self.second, self.slow, self.greedy = nn.Linear(64, 32), nn.Linear(32, 10), slow, greedy

    def forward(self, pixels):
        time.sleep(self.slow)
        if os.path.exists("crash") and os.environ.get("RANK") == "1":
            os.remove("crash")
            Crash()
            gc.collect()
        if self.greedy and len(pixels) > 2 and torch.is_grad_enabled():
            torch.empty(2**50)
        return self.second(self.first(pixels.flatten(1)).relu())

class Sharpen(nn.Module):
    def forward(self, image):
        time.sleep(0.02)
        return image

class Sleepy(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.1)
        return super().step(closure)
"""
SMALL = [
    *(*QUIET, "device=cpu", "dataset=digits", "transforms=none", "name=measured", "max_steps=6"),
    *("~model", "+model={_target_: lab_of_profiles.Net}", "~dataset.train", "+dataset.train={_target_: lab_of_profiles.Digits}"),
    *("~dataset.valid", "+dataset.valid={_target_: lab_of_profiles.Digits}", "batch_size=4"),
]
SLOW = {
    "data": (["+dataset.train.slow=0.02"], "the data set Digits", "loader.num_workers="),
    "transforms": (["+transforms.train.sample=[{_target_: lab_of_profiles.Sharpen}]"], "the transform Sharpen", "loader.num_workers="),
    "forward and backward": (["+model.slow=0.1"], "the model's own work", "compile=default"),
    "optimizer": (["~optimizer", "+optimizer={_target_: lab_of_profiles.Sleepy, _partial_: true, lr: 0.1}"], "the update of 2,410 parameters", "batch_size=8"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the classes above; commands are given in it."""
    (tmp_path / "lab_of_profiles.py").write_text(LAB)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab_of_profiles"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("part", SLOW)
def test_a_planted_slowness_is_named_as_the_cause(part: str, here: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)))
    overrides, named, change = SLOW[part]
    done = samewise("profile", *SMALL, *overrides, "--steps", 2, "--traced", 0, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["advice"][0]["part"] == part
    assert named in found["advice"][0]["why"]
    assert any(one.startswith(change) for one in found["advice"][0]["change"])
    assert sum(found["ranks"][0]["parts_ms"].values()) == pytest.approx(found["ranks"][0]["measured_ms"], rel=1e-9)
    assert max(found["ranks"][0]["parts_ms"].items(), key=lambda one: one[1])[0] == part.partition(" ")[0]


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_profile_has_the_bits_of_training_and_touches_no_run(here: Path, samewise: Callable[..., Any]) -> None:
    profile = ["profile", *SMALL, "--steps", 2, "--traced", 2, "--json"]
    first = json.loads(samewise(*profile).stdout)
    assert not (here / "runs").exists()
    assert samewise("train", *SMALL).returncode == 0
    trained = [json.loads(line) for line in next(here.glob("runs/*/*/trace.jsonl")).read_text().splitlines()]
    assert trained[-1]["step"] == 6
    assert first["chain"] == trained[-1]["chain"], "the steps that were measured and watched are those of training"
    before = digests(here / "runs")
    second = json.loads(samewise(*profile).stdout)
    assert second["chain"] == first["chain"]
    assert second["fingerprint"] == first["fingerprint"]
    assert digests(here / "runs") == before
    assert [path.name for path in sorted((here / "profiles" / "measured").iterdir())] == [first["fingerprint"][:12], f"{first['fingerprint'][:12]}-2"]

    folder = here / "profiles" / "measured" / first["fingerprint"][:12]
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "rank-0.trace.json.gz"]
    events = json.loads(gzip.decompress((folder / "rank-0.trace.json.gz").read_bytes()))["traceEvents"]
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"data", "forward", "backward", "optimizer", "trace", "step 5", "step 6"} <= named
    assert any(event.get("cat") == "python_function" and "train_step" in event["name"] for event in events)
    assert any(event.get("name") == "[memory]" for event in events)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--steps", "0"], "--steps: must be at least 1"),
        (["max_steps=3"], "max_steps: a profile takes at least 6 steps"),
        (["--out", "."], "--out: is not an empty folder"),
        (["optimiser.lr=1"], "did you mean 'optimizer"),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(given: list[str], told: str, here: Path, samewise: Callable[..., Any]) -> None:
    done = samewise("profile", *SMALL, *given)
    assert done.returncode == 2
    assert told in done.stderr


def test_memory_is_reported_by_part(here: Path, tmp_path: Path) -> None:
    from samewise.runner.measuring.profile import rehearse

    project = Project(here, ("lab_of_profiles",))
    overrides = [*SMALL, "batch_size=32", "optimizer=adam", "accumulate=2"]
    with rehearse(compose(overrides, project=project)) as run:
        parts = memory.parts_of(run)
        few = memory.parts_of(run, samples=4)
    weights = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    assert parts["weights"] == parts["gradients"] == weights
    assert parts["optimizer state"] == 2 * weights, "Adam's, known before its first step"
    micro = 16
    assert parts["batch"] == micro * (64 * 4 + 8)
    hidden, classes = micro * 32 * 4, micro * 10 * 4
    assert hidden + classes <= parts["activations"] <= hidden + 4 * classes, "what the second layer and the loss need again"
    assert few["batch"] == parts["batch"]
    assert abs(few["activations"] - parts["activations"]) <= classes


@pytest.mark.slow
def test_out_of_memory_reports_the_size_of_each_part_and_how_to_reduce_it(here: Path, samewise: Callable[..., Any]) -> None:
    greedy = [*SMALL, "+model.greedy=true", "batch_size=8"]
    for command in ("train", "check", "profile"):
        done = samewise(command, *greedy)
        assert done.returncode == 2, done.stderr
        assert "the first step asks for 4.5e+06 GB of memory at once, which is not available. A step takes: weights 9.64 kB, gradients 9.64 kB" in done.stderr
        assert "(estimated from 2 samples for 8)" in done.stderr
        assert "batch_size=4, or accumulate=2: half the activations at a time" in done.stderr
    assert not list(here.glob("runs/*/*/summary.json"))
    assert not list(here.glob("profiles/*/*"))


@pytest.mark.slow
def test_each_process_has_its_own_trace_also_if_one_crashed_first(here: Path, samewise: Callable[..., Any]) -> None:
    (here / "crash").touch()
    done = samewise("profile", *SMALL, "replicas=2", "strategy=elastic", "strategy.nproc=2", "--steps", 2, "--traced", 1, "--out", here / "told")
    assert done.returncode == 0, done.stderr
    assert "warning: rank 1 was killed by SIGSEGV in __del__ (" in done.stderr
    assert "starting again (restart 1 of 1)" in done.stderr
    assert "rank 1: " in done.stdout
    found = json.loads((here / "told" / "profile.json").read_text())
    assert len(found["ranks"]) == 2
    for rank in range(2):
        trace = json.loads(gzip.decompress((here / "told" / f"rank-{rank}.trace.json.gz").read_bytes()))
        assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (rank, 2)
        assert {"exchange", "gloo:all_to_all"} <= {event["name"] for event in trace["traceEvents"]}
    assert {file.name for file in (here / "told").iterdir()} == {*found["files"]}, "no logs of the ranks"
    assert not (here / "runs").exists()
    assert samewise("train", *SMALL, "replicas=2", "max_steps=5").returncode == 0
    trained = [json.loads(line) for line in next(here.glob("runs/*/*/trace.jsonl")).read_text().splitlines()]
    assert trained[-1]["chain"] == found["chain"], "2 steps before, 2 measured, 1 watched"
