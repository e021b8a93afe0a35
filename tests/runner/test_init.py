"""A project created by `samewise init` trains at once, unchanged."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.config import project
from samewise.runner.config.compose import compose
from samewise.runner.sweeps.points import Composer

Run = Callable[..., Any]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_project_is_sound_and_has_its_own_experiment(samewise: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = samewise("init", "init-lab")
    assert made.returncode == 0, made.stderr
    assert "samewise train" in made.stdout
    assert sorted(path.name for path in here.iterdir()) == ["init-lab"]
    files = [path for path in here.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert not [path for path in files if "mylab" in path.name or "mylab" in path.read_text()]
    monkeypatch.chdir("init-lab")
    checked = samewise("check", "--static")
    assert checked.returncode == 0, checked.stderr
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
    done = samewise("init", ".", "--package", "init_lab")
    assert done.returncode == 2
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
