"""`samewise verify --audit` replays parts of a run, and names the first step and tensor that differ, however well the rest agrees."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_drops import DROPS

from samewise.runner.records.digest import combine, state_sha256, tensor_digests

PACKAGE = "lab_of_audits"
LAB = (
    DROPS
    + """
from pathlib import Path

import torch
from torch import nn

from samewise.runner.interfaces import Callback

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, pixels):
        return self.last(self.norm(self.first(pixels.flatten(1))).relu())

class Shifted(Net):
    # its evaluation depends on a file

    def forward(self, pixels):
        return super().forward(pixels if self.training else pixels + float(Path("shift").read_text()))

NETS = []

class Listed(Net):
    def __init__(self):
        super().__init__()
        NETS[:] = [self]

class Pokes(Callback):
    # changes a weight after the tenth step

    def on_step(self, run, outcome):
        if outcome.step == 10:
            with torch.no_grad():
                NETS[0].last.bias[0] += 0.5
"""
)
TINY = [
    *("dataset=digits", "transforms=images", "debug=tiny", "tracking=none", "evaluate.pictures=false", "callbacks=ema", "name=audited"),
    *("~model", "+model={_target_: lab_of_audits.Net}", "optimizer=sgd", "optimizer.momentum=0.9", "evaluate.limit=2", "optimizer.lr=0.01"),
    *("~scheduler", "+scheduler={_target_: lab_of_audits.Drops, drops_at: 10000, momentum: 0.5}"),
]
SHORT = ["max_steps=20", "checkpoint.every_steps=10", "evaluate.every_steps=10"]
HUNDRED = ["max_steps=100", "checkpoint.every_steps=10", "checkpoint.keep_every_steps=10", "evaluate.every_steps=10"]


def enter(folder: Path) -> None:
    (folder / f"{PACKAGE}.py").write_text(LAB)
    (folder / "pyproject.toml").write_text(f'[tool.samewise]\npackages = ["{PACKAGE}"]\n')
    os.chdir(folder)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory):
    from samewise.runner.cli import main

    place, before = tmp_path_factory.mktemp("lab"), Path.cwd()
    enter(place)

    def run(name: str, *more: str) -> Path:
        assert main(["train", *TINY, f"run_root={place / name}", *more]) == 0
        (folder,) = place.glob(f"{name}/*/*/")
        return folder

    yield run
    os.chdir(before)
    sys.path[:] = [path for path in sys.path if Path(path) != place]
    sys.modules.pop(PACKAGE, None)


@pytest.fixture(scope="module")
def honest(train: Callable[..., Path]) -> Path:
    return train("honest", *HUNDRED)


@pytest.fixture(scope="module")
def dishonest(train: Callable[..., Path]) -> Path:
    """Trained with another momentum from step 33 on."""
    return train("dishonest", *HUNDRED, "scheduler.drops_at=33")


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return copy_run(honest, tmp_path)


def copy_run(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / folder.parent.name / folder.name, symlinks=True))


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def forge(run: Path, *, line: tuple[int, dict[str, Any]] | None = None, states: dict[int, Callable[[dict[str, Any]], Any]] | None = None) -> None:
    """Alter a line of the trace and states of checkpoints, and make everything derived from them consistent: chain, hashes, digests and summary."""
    head, *texts = (run / "trace.jsonl").read_text().splitlines()
    lines, chain = {one["step"]: one for one in map(json.loads, texts)}, 0
    if line:
        lines[line[0]] |= line[1]
    for one in lines.values():
        chain = combine([chain, *(int(one[name], 16) for name in ("batch", "input", "gradients", "weights"))])
        one["chain"] = f"{chain:016x}"
    (run / "trace.jsonl").write_text("\n".join([head, *(json.dumps(one, separators=(",", ":")) for one in lines.values())]) + "\n")
    digests = {}
    for folder in sorted(run.glob("checkpoints/step-*")):
        step = int(folder.name.removeprefix("step-"))
        state = torch.load(folder / "state.pt", weights_only=True)
        (states or {}).get(step, lambda state: None)(state)
        state["trace"] = int(lines[step]["chain"], 16)
        torch.save(state, folder / "state.pt")
        digests[str(step)] = sha256 = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
        weights = f"{combine(tensor_digests(state['model'])):016x}"
        content = state_sha256({name: value for name, value in state.items() if name not in ("format", "seconds")})
        known = {"sha256": sha256, "weights": weights, "content": content, "metrics": state["metrics"]}
        rewrite(folder / "manifest.json", lambda manifest, known=known: manifest.update(known))
    trace = hashlib.sha256((run / "trace.jsonl").read_bytes()).hexdigest()
    rewrite(run / "summary.json", lambda summary: summary.update(trace_sha256=trace, checkpoints_sha256=digests))


def audit(samewise, run: Path, *given: str) -> dict[str, Any]:
    done = samewise("verify", run, "--audit", *(given or ("all",)), "--json", "--trust")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] == (done.returncode == 0)
    return found


def test_an_audit_of_an_honest_run_draws_its_parts_by_seed(samewise, run) -> None:
    found = audit(samewise, run, "3", "--audit-seed", "7")
    assert found["same"], found["messages"]
    replayed = found["audit"]["replayed"]
    assert (len(replayed), found["audit"]["steps"], found["compared"]) == (3, 30, 30)
    assert sorted([*replayed, *found["audit"]["left"]]) == [[start + 1, start + 10] for start in range(0, 100, 10)]
    assert audit(samewise, run, "3", "--audit-seed", "7")["audit"]["replayed"] == replayed
    assert audit(samewise, run, "3", "--audit-seed", "8")["audit"]["replayed"] != replayed
    told = samewise("verify", run, "--audit", "9").stdout
    assert "audited: 9 of 10 segments, 90 of 100 steps (drawn with --audit-seed " in told
    assert "not audited: steps " in told


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32).view(-1)[0] ^= 1


def flip_in(name: str) -> Callable[[dict[str, Any]], None]:
    """What flips a bit of a tensor in a checkpoint's state."""

    def change(state: dict[str, Any]) -> None:
        flip(
            {"weight": state["model"], "optimizer": state["optimizers"]["train"]["state"][2], "ema": state["callbacks"]["ema"]["averaged"]}[name][PLACES[name]]
        )

    return change


PLACES = {"weight": "last.weight", "optimizer": "momentum_buffer", "ema": "norm.bias"}
CHANGES: dict[str, tuple[dict[str, Any], tuple[int, str, str]]] = {
    "a line's batch": ({"line": (47, {"batch": "0" * 16})}, (47, "batch", "")),
    "a line's loss": ({"line": (47, {"loss": "0x1.8p+0"})}, (47, "loss", "")),
    "weights": ({"states": {50: flip_in("weight")}}, (50, "checkpoint", "last.weight")),
    "a momentum": ({"states": {30: flip_in("optimizer")}}, (30, "checkpoint", "the optimizer's momentum_buffer of norm.weight")),
    "averaged weights": ({"states": {30: flip_in("ema")}}, (30, "checkpoint", "callbacks.ema: averaged: norm.bias")),
}
"""What is changed in a record whose digests all agree with it, and the first difference."""


@pytest.mark.parametrize(
    "change", [next(iter(CHANGES)), "weights", *(pytest.param(name, marks=pytest.mark.slow) for name in CHANGES if name not in ("a line's batch", "weights"))]
)
def test_the_first_step_and_tensor_that_differ_are_named(samewise, run, change) -> None:
    changed, expected = CHANGES[change]
    forge(run, **changed)
    found = audit(samewise, run)
    assert not found["same"]
    assert tuple(found["parts"][key] for key in ("step", "stage", "layer")) == expected


@pytest.mark.slow
def test_the_first_step_trained_with_another_momentum_is_named(samewise, honest, dishonest, tmp_path) -> None:
    run = copy_run(dishonest, tmp_path)
    shutil.copy(honest / "config.yaml", run / "config.yaml")  # what it claims to be trained with
    found = audit(samewise, run)
    assert (found["parts"]["step"], found["parts"]["stage"], found["parts"]["layer"]) == (33, "weights", "first.weight")
    assert "config.yaml is that of another experiment" in found["altered"][0]


def test_an_evaluation_that_differs_is_named_by_its_metric(samewise, train) -> None:
    Path("shift").write_text("0")
    run = train("shifted", *SHORT, "model._target_=lab_of_audits.Shifted")
    Path("shift").write_text("0.5")
    for said in (audit(samewise, run)["messages"], samewise("verify", run).stdout.splitlines()):
        assert any(line.startswith("step 10: valid/loss was logged as ") for line in said)


def test_weights_that_a_callback_changes_after_they_are_traced_are_not_an_alteration(samewise, train) -> None:
    run = train("poked", *SHORT, "model._target_=lab_of_audits.Listed", "+callbacks.pokes._target_=lab_of_audits.Pokes")
    words = "step 10: the weights in step-00000010 differ from those in the trace, but equal those of a second training: a callback changes"
    assert words in samewise("verify", run).stdout
    found = audit(samewise, run)
    assert found["same"]
    assert found["messages"][0].startswith(words)
