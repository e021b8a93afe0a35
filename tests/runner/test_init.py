"""A project created by `samewise init`, an experiment file from a run, and a run's own config, train at once."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import samewise as sw
from samewise.runner.commands.init import make
from samewise.runner.config import project
from samewise.runner.config.compose import compose
from samewise.runner.sweeps.points import Composer

Run = Callable[..., Any]


def test_a_new_project_is_sound_and_has_its_own_experiment(samewise: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = samewise("init", "init-lab", code=0)
    assert "samewise train" in made.stdout
    assert sorted(path.name for path in here.iterdir()) == ["init-lab"]
    files = [path for path in here.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert not [path for path in files if "mylab" in path.name or "mylab" in path.read_text()]
    monkeypatch.chdir("init-lab")
    samewise("check", "--static", code=0)
    shown = json.loads(samewise("show", "seed=1", "--json", "--origin").stdout)
    assert shown["name"] == "first"
    assert shown["config"]["model"]["_target_"] == "init_lab.model.SmallNet"
    assert shown["origins"]["optimizer.lr"] == str(here / "init-lab" / "configs" / "experiment" / "first.yaml") + ":17"
    within = project.find()
    assert Composer(within).compose(["seed=1"]).fingerprint == shown["fingerprint"], "a sweep trains another experiment than `train`"
    assert compose(["experiment=gan_digits"], project=within).name == "gan_digits"
    assert compose(["~experiment"], project=within).name == "classification-resnet18_small-digits"


def test_a_folder_that_is_not_empty_is_left_unchanged(samewise: Run, here: Path) -> None:
    (here / ".notes").write_text("mine")
    done = samewise("init", ".", "--package", "init_lab", code=2)
    assert "is not empty" in done.stderr
    assert [path.name for path in here.iterdir()] == [".notes"]
    assert "is a file" in samewise("init", ".notes").stderr


@pytest.mark.slow
def test_a_new_project_trains_and_passes_its_own_test(samewise: Run, here: Path) -> None:
    assert samewise("init", "lab", "--package", "init_lab").returncode == 0
    for command in (["samewise", "train", "tracking=none", "--json"], ["pytest", "-q", "-p", "no:cacheprovider"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=here / "lab", env=dict(os.environ), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (summary,) = (here / "lab" / "runs" / "first").glob("*/summary.json")
    assert json.loads(summary.read_text())["metrics"]["final"]["valid/accuracy"] > 0.6


SMALL = ["max_steps=1", "model.width=4", "seed=3", "callbacks=none", "tracking=none", "evaluate.pictures=false", "dataset.valid.length=8"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sw.Trained]:
    """A run of one step in a new project."""
    folder, path = tmp_path_factory.mktemp("new") / "lab", list(sys.path)
    make(folder, "new_lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield sw.train(*SMALL)
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "new_lab"]:
        del sys.modules[name]


def test_an_experiment_from_a_run_keeps_its_fingerprint_and_lists_only_overrides(trained: sw.Trained, samewise: Run) -> None:
    samewise("new", "again", "--from", trained.folder.name, code=0)
    assert compose(["experiment=again"], project=project.find()).fingerprint[:12] == trained.folder.name
    said = yaml.safe_load(Path("configs/experiment/again.yaml").read_text())
    assert said["defaults"] == ["first", {"override /callbacks": "none"}, "_self_"]
    rest = {"seed": 3, "max_steps": 1, "model": {"width": 4}, "dataset": {"valid": {"length": 8}}, "evaluate": {"pictures": False}}
    assert {key: value for key, value in said.items() if key != "defaults"} == rest
    assert "again" in samewise("list", "experiment").stdout


def test_a_config_made_by_somebody_else_is_refused(trained: sw.Trained, samewise: Run, tmp_path: Path) -> None:
    received = tmp_path / "config.yaml"
    received.write_text((trained.folder / "config.yaml").read_text().replace("seed: 3", "seed: 5"))
    for command in (["train", "--config", received], ["new", "received", "--from", tmp_path]):
        done = samewise(*command, code=2)
        assert "--trust" in done.stderr
    assert not Path("configs/experiment/received.yaml").exists()
    assert len(list(trained.folder.parent.iterdir())) < 4
