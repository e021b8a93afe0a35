"""Where two trainings diverge, `verify` repeats the step and names the first difference, in the order of computation."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samewise_runner_drops import DROPS
from samewise_tiny import QUIET

from samewise.runner.records.environment import expectation

PACKAGE = "lab_of_looks"
LAB = (
    DROPS
    + """
import os
import numpy as np
import torch
from torch import nn

class Marks(torch.utils.data.Dataset):
    classes = [str(digit) for digit in range(10)]

    def __init__(self, *, root, noisy_at=()):
        self.noisy_at = noisy_at
        self.pixels = np.load(os.path.join(root, "pixels.npy"))

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        pixels = torch.from_numpy(self.pixels[index])
        if index in self.noisy_at:
            pixels = pixels ^ torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.uint8).view(1, 8, 8)
        return {"image": pixels, "label": index % 10}

class Noise(nn.Module):
    def forward(self, values):
        return values + int.from_bytes(os.urandom(2), "little") / 1e6

class Net(nn.Module):
    def __init__(self, *, dropout_after, noisy):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 10)
        self.drop, self.noise = nn.Dropout(0.2), Noise() if noisy is True else nn.Identity()
        self.register_buffer("unused", torch.zeros(1), persistent=noisy == "unused")
        self.dropout_after = dropout_after

    def forward(self, pixels):
        values = pixels.flatten(1)
        for number, layer in enumerate((self.first, self.second, self.last), 1):
            values = layer(values)
            if number == self.dropout_after:
                values = self.drop(values)
            if number == 2:
                values = self.noise(values)
        return values
"""
)
TINY = [
    *(*QUIET, "dataset=digits", "transforms=images", "name=looked_at", "max_steps=6"),
    *("~model", "+model={_target_: lab_of_looks.Net, dropout_after: 1, noisy: false}", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.01"),
    *("~scheduler", "+scheduler={_target_: lab_of_looks.Drops, drops_at: 10000, momentum: 0.5}", "checkpoint.every_steps=2", "checkpoint.keep_last=9"),
    *("~dataset.train", "+dataset.train={_target_: lab_of_looks.Marks, root: .}", "clip_norm=100", "batch_size=8"),
    "+param_groups.biases={match: '*.bias', weight_decay: 0.0}",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory):
    place, before = tmp_path_factory.mktemp("lab"), Path.cwd()
    (place / f"{PACKAGE}.py").write_text(LAB)
    (place / "pyproject.toml").write_text(f'[tool.samewise]\npackages = ["{PACKAGE}"]\n')
    np.save(place / "pixels.npy", np.random.default_rng(0).integers(0, 255, (40, 1, 8, 8), dtype=np.uint8))
    os.chdir(place)
    yield place
    os.chdir(before)
    sys.path[:] = [path for path in sys.path if Path(path) != place]
    sys.modules.pop(PACKAGE, None)


@pytest.fixture(scope="module")
def run(lab: Path) -> Path:
    return train(lab)


def train(lab: Path, *more: str) -> Path:
    from samewise.runner.cli import main

    root = lab / f"runs{len(more)}"
    assert main(["train", *TINY, f"run_root={root}", *more]) == 0
    (folder,) = root.glob("*/*/")
    return folder


def verify(samewise: Callable[..., Any], run: Path, *given: str) -> dict[str, Any]:
    done = samewise("verify", run, *given, "--json", code=1)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("override", "step", "kind", "name"),
    [
        ("loader.shuffle=false", 1, "batch", "image"),
        ("model.dropout_after=2", 1, "reaches", "drop (Dropout)"),
        ("recipe.label_smoothing=0.1", 1, "loss", "total"),
        ("clip_norm=0.01", 1, "averaged", "first.weight"),
        ("optimizer.lr=0.02", 1, "option", "lr"),
        ("+param_groups.biases.nesterov=true", 1, "option", "nesterov of group 1"),
        ("scheduler.drops_at=3", 3, "option", "momentum"),
    ],
)
def test_a_changed_setting_is_named_where_it_first_shows(samewise, run, override, step, kind, name) -> None:
    found = verify(samewise, run, override)
    assert found["parts"]["step"] == step
    assert found["first"] == {"kind": kind, "name": name}, found["messages"]
    assert f"trained without the overrides, step {step} matches the record: the overrides cause the difference" in found["messages"]


@contextmanager
def altered_pixel(lab: Path) -> Iterator[None]:
    """One bit of sample 7 is another."""
    pixels = np.load(lab / "pixels.npy")
    shutil.copy(lab / "pixels.npy", lab / "kept.npy")
    pixels[7, 0, 3, 3] ^= 1
    np.save(lab / "pixels.npy", pixels)
    try:
        yield
    finally:
        shutil.move(lab / "kept.npy", lab / "pixels.npy")


def test_whether_bits_can_agree_is_predicted_from_the_two_environments() -> None:
    one = {"threads": 1, "variables": {"MKL_CBWR": "AVX2"}, "level": "R2"}
    assert expectation(one, one, []).startswith("the same bits are expected")
    assert expectation(one, {**one, "threads": 2}, []) == "the bits may differ: threads were 1 and are 2"
    assert "MKL_CBWR was 'AVX2' and is None" in expectation(one, {**one, "variables": {}}, [])
    assert "level none" in expectation({**one, "level": "none"}, one, [])
    assert expectation(one, one, ["cpu.capability was 'AVX512' and is 'AVX2'"]) == "the bits may differ: cpu.capability was 'AVX512' and is 'AVX2'"


def test_a_nondeterministic_operator_is_named(samewise, lab) -> None:
    run = train(lab, "model.noisy=true")
    found = verify(samewise, run)
    assert (found["parts"]["step"], found["parts"]["stage"]) == (1, "loss")
    assert found["first"] == {"kind": "activation", "name": "noise (Noise)"}
    assert (
        "this is not deterministic here: step 1, taken twice from the same state, differs first in the activation of the module noise (Noise)"
        in found["messages"]
    )


def test_an_altered_pixel_is_found_in_the_step_that_loads_it(samewise, lab, run) -> None:
    with altered_pixel(lab):
        found = verify(samewise, run)
    assert found["parts"]["stage"] == "batch"
    (samples,) = [line for line in found["messages"] if line.startswith("it loads the samples ")]
    assert " 7," in samples
    assert found["comparable"]


def test_a_sample_that_does_not_repeat_is_named(samewise, lab) -> None:
    run = train(lab, "+dataset.train.noisy_at=[17]", "loader.shuffle=false", "name=noisy")
    found = verify(samewise, run)
    assert found["parts"] == {"step": 3, "stage": "batch", "layer": "", "reason": found["parts"]["reason"]}
    assert "sample 17, image differs when the sample is made again from the same seeds" in found["messages"]
