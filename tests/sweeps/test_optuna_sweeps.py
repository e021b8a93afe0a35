"""Whole sweeps with Optuna, in a project whose training takes milliseconds: killed, pruned from inside training, and with several seeds."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_forked import Forked

from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.sweepers.optuna_study import optuna, storage

COMPLETE, PRUNED, FAIL, RUNNING = (getattr(optuna.trial.TrialState, name) for name in ("COMPLETE", "PRUNED", "FAIL", "RUNNING"))

Sweep = Callable[..., dict[str, Any]]


def trials(folder: Path) -> list[Any]:
    return optuna.load_study(study_name=folder.name, storage=storage(folder)).trials


PACKAGE = """
import math
import os
import torch
from torch import nn
from samewise.runner.interfaces import Loss, Recipe, Scores

class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": torch.ones(1)}

class Bowl(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.floor = (a - 2) ** 2 + (math.log10(b) + 2) ** 2
    def forward(self, x):
        if os.path.exists("broken"):
            raise RuntimeError("broken")
        return x * (self.floor + self.weight**2)

class Last(Scores):
    def add(self, measured):
        self.value = measured
    def compute(self):
        return {"value": self.value}

class Descend(Recipe):
    def loss(self, model, batch, phase):
        total = model(batch["x"]).sum()
        return Loss(total, len(batch["x"]))
    def measure(self, model, batch):
        return float(model(batch["x"]).mean())
    def scores(self, dataset):
        return Last()
"""
CONFIGS = {
    "recipe": "# Down the bowl\n_target_: bowls.Descend\n",
    "model": "# A bowl\n_target_: bowls.Bowl\na: 0.0\nb: 1.0\n",
    "dataset": "# Ones\ntrain: {_target_: bowls.Ones}\nvalid: {_target_: bowls.Ones}\n",
    "experiment": """# @package _global_
# A bowl whose bottom depends on two settings
defaults:
  - override /recipe: bowl
  - override /model: bowl
  - override /dataset: bowl
  - override /transforms: none
  - override /callbacks: none
  - override /tracking: none
  - _self_
max_epochs: 8
batch_size: 8
optimizer: {lr: 0.1}
evaluate: {monitor: valid/value, mode: min}
checkpoint: {every_epochs: null, keep_best: 0}
trace: {every_steps: 0, layers_every_steps: 0}
""",
}

SPACE = {"a": "interval(-5.0,5.0)", "b": "tag(log,interval(1e-4,1.0))"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\nconfigs = "configs"\n')
    (tmp_path / "bowls").mkdir()
    (tmp_path / "bowls" / "__init__.py").write_text(PACKAGE)
    for group, text in CONFIGS.items():
        (tmp_path / "configs" / group).mkdir(parents=True)
        (tmp_path / "configs" / group / "bowl.yaml").write_text(text)
    return tmp_path


def words(*overrides: str) -> list[str]:
    varied = [f"model.{key}={values}" for key, values in SPACE.items() if not any(one.startswith(f"model.{key}=") for one in overrides)]
    return ["sweep", "--json", "--package", "bowls", "experiment=bowl", *varied, *overrides]


@pytest.fixture
def sweep(project: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a sweep in the project, which has to end with an exit code; returns what it reports."""
    monkeypatch.chdir(project)

    def run(*overrides: str, code: int = 0) -> dict[str, Any]:
        done = samewise(*words(*overrides))
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    return run


def kill_at(project: Path, points: int, *overrides: str) -> None:
    """Run the sweep, and kill its process as soon as this many points are recorded."""
    process = Forked(*words(*overrides), said=project / "said", folder=project)
    deadline = time.monotonic() + 500
    while process.poll() is None and _points(project) < points:
        assert time.monotonic() < deadline, "the sweep makes no progress"
        time.sleep(0.01)
    process.send(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL, process.errors


def _points(project: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in project.glob("runs/sweeps/*/points.jsonl"))


def only_sweep(project: Path) -> SweepFolder:
    (folder,) = (project / "runs" / "sweeps").iterdir()
    return SweepFolder(folder)


PRUNING = ("sweeper=tpe", "sweeper.pruner=median", "sweeper.pruner_options={n_startup_trials: 2}")


@pytest.mark.slow  # a sweep of four trainings, each a process
def test_a_pruned_run_is_saved_and_marked_and_can_be_trained_to_its_end(sweep: Sweep, project: Path, samewise: Callable[..., Any]) -> None:
    said = sweep(*PRUNING, "sweeper.seed=1", "sweeper.trials=4", "launcher.jobs=1")
    folder = only_sweep(project)
    by_state = {state: [one for one in said["points"] if one["state"] == state] for state in ("finished", "pruned")}
    assert len(by_state["finished"]) + len(by_state["pruned"]) == 4
    pruned = by_state["pruned"][0]
    run = project / pruned["folder"]
    reason = folder.word(pruned["number"])["pruned"]
    assert pruned["reason"] == reason
    assert "valid/value" in reason
    assert "by median" in reason
    assert pruned["steps"] < 8
    assert not (run / "summary.json").exists()
    assert any((run / "checkpoints").iterdir())
    assert json.loads((run / "tags.json").read_text()) == {"sweep.pruned": reason}
    study = trials(folder.path)
    assert [one.number for one in study if one.state is PRUNED] == [one["number"] for one in by_state["pruned"]]
    assert study[pruned["number"]].intermediate_values.keys() == set(range(1, pruned["steps"] + 1))
    assert all(len(study[one["number"]].intermediate_values) == 8 for one in by_state["finished"])

    overrides = ["--package", "bowls", *folder.points()[pruned["number"]].overrides]
    by_hand, afresh = (samewise("train", "--json", *overrides, *other) for other in ([], ["run_root=afresh"]))
    ends = [json.loads(done.stdout.splitlines()[-1]) for done in (by_hand, afresh)]
    assert [one["steps"] for one in ends] == [8, 8]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert ends[0]["fingerprint"] == pruned["fingerprint"]


@pytest.mark.slow  # 24 trainings, and three processes that run them
@pytest.mark.timeout(900)
def test_many_trials_survive_two_kills_of_the_controller(sweep: Sweep, project: Path) -> None:
    asked = (*PRUNING, "sweeper.trials=24", "launcher.jobs=3")
    kill_at(project, 6, *asked)
    kill_at(project, 14, *asked)
    said = sweep(*asked)
    folder, points = only_sweep(project), only_sweep(project).points()
    study = trials(folder.path)
    assert [one.number for one in study] == [point.setting for point in points] == [point.number for point in points] == list(range(24))
    assert len({point.fingerprint for point in points}) == 24
    for trial, point, told in zip(study, points, said["points"], strict=True):
        assert {key: str(value) for key, value in trial.params.items()} == point.values
        assert told["state"] == {COMPLETE: "finished", PRUNED: "pruned"}[trial.state]
        assert trial.state is PRUNED or trial.value == told["value"]
        assert bool(folder.word(point.number).get("pruned")) == (trial.state is PRUNED)
    assert 0 < sum(one.state is PRUNED for one in study) < 24
    tries = [folder.word(point.number)["tries"] for point in points]
    assert sum(tries) - 24 <= 6, "a kill costs another start to those that ran, and to no others"
    assert sweep(*asked) == said, "nothing is run again"
    assert [folder.word(point.number)["tries"] for point in points] == tries
    assert len(trials(folder.path)) == 24
