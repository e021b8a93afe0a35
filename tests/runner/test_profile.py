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

LAB = """
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

class Net(nn.Module):
    def __init__(self, *, slow=0.0):
        super().__init__()
        self.first, self.second, self.slow = nn.Linear(64, 32), nn.Linear(32, 10), slow

    def forward(self, pixels):
        time.sleep(self.slow)
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
    "data": "+dataset.train.slow=0.02",
    "transforms": "+transforms.train.sample=[{_target_: lab_of_profiles.Sharpen}]",
    "forward": "+model.slow=0.1",
    "optimizer": "~optimizer +optimizer={_target_:lab_of_profiles.Sleepy,_partial_:true,lr:0.1}",
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
def test_a_planted_slowness_is_found_in_its_part(part: str, here: Path, samewise: Callable[..., Any]) -> None:
    overrides = [SLOW[part]] if part == "transforms" else SLOW[part].split()
    done = samewise("profile", *SMALL, *overrides, "--steps", 2, "--traced", 0, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(found["ranks"][0]["parts_ms"].values()) == pytest.approx(found["ranks"][0]["measured_ms"], rel=1e-9)
    assert max(found["ranks"][0]["parts_ms"].items(), key=lambda one: one[1])[0] == part


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
