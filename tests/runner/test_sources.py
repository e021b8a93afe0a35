"""A run belongs to the code that it was trained with: a repeated command says which file is other now."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TINY = [
    "dataset=digits",
    "transforms=images",
    "debug=tiny",
    "tracking=none",
    "evaluate.pictures=false",
    "callbacks=none",
    "max_steps=4",
    "checkpoint.every_steps=2",
    "name=code",
]
MODEL = ["~model", "+model={_target_:lab_of_code.net.Net}"]
FILES = {
    "pyproject.toml": '[tool.samewise]\npackages = ["lab_of_code"]\n',
    "lab_of_code/__init__.py": "",
    "lab_of_code/net.py": """
import torch
from torch import nn
from .parts import layers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = layers.head()

    def forward(self, pixels):
        return self.head(pixels.flatten(1))
""",
    "lab_of_code/parts/__init__.py": "",
    "lab_of_code/parts/layers.py": """
from torch import nn


def head():
    from helper_of_lab_of_code import WIDTH

    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
""",
    "lab_of_code/unused.py": "raise RuntimeError\n",
    "helper_of_lab_of_code.py": "WIDTH = 16\n",
}
USED = ["helper_of_lab_of_code.py", "lab_of_code/__init__.py", "lab_of_code/net.py", "lab_of_code/parts/__init__.py", "lab_of_code/parts/layers.py"]


def forget() -> None:
    """What another process would not have: the modules of the lab, and its folder on the path."""
    for name in [name for name in sys.modules if "lab_of_code" in name]:
        del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not (Path(place) / "lab_of_code").is_dir()]
    importlib.invalidate_caches()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    project = tmp_path / "project"
    for name, text in FILES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    monkeypatch.chdir(project)
    yield project
    forget()


@pytest.fixture
def train(samewise, lab, tmp_path):
    def run(*overrides: str):
        forget()
        return samewise("train", *TINY, *MODEL, f"run_root={tmp_path}/runs", *overrides)

    return run


def the_run(lab: Path) -> Path:
    (folder,) = (lab.parent / "runs" / "code").glob("*/")
    return folder


def edit(file: Path) -> str:
    before = file.read_text()
    file.write_text(before.replace("ReLU", "GELU") + "\n# edited\n")
    return before


def state(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_finished_run_answers_for_the_code_it_was_trained_with_and_no_other(train, lab):
    assert train().returncode == 0
    assert sorted(json.loads((the_run(lab) / "sources.json").read_text())) == USED
    before = state(the_run(lab))
    edit(lab / "lab_of_code" / "unused.py")
    assert "already finished" in train().stdout
    for names in (USED[:2], USED[2:]):
        texts = {name: edit(lab / name) for name in names}
        done = train()
        assert done.returncode == 2, done.stdout
        assert [name for name in USED if f"{name} has changed" in done.stderr] == names
        assert "name=" in done.stderr
        for name, text in texts.items():
            (lab / name).write_text(text)
    assert "already finished" in train().stdout
    assert state(the_run(lab)) == before


def test_an_old_result_is_given_with_a_warning_where_that_is_asked_for(train, lab):
    assert train().returncode == 0
    (lab / "helper_of_lab_of_code.py").unlink()
    assert "helper_of_lab_of_code.py no longer exists" in train().stderr
    done = train("reproducibility.other_environment=record")
    assert done.returncode == 0
    assert "already finished" in done.stdout
    assert "warning: helper_of_lab_of_code.py no longer exists" in done.stderr


def test_a_run_that_is_half_done_goes_on_only_with_its_own_code(train, lab):
    assert train().returncode == 0
    weights = json.loads((the_run(lab) / "summary.json").read_text())["weights_sha256"]
    (the_run(lab) / "summary.json").unlink()
    shutil.rmtree(the_run(lab) / "checkpoints" / "step-00000004")
    before = state(the_run(lab))
    text = edit(lab / "lab_of_code" / "parts" / "layers.py")
    done = train()
    assert done.returncode == 2
    assert "lab_of_code/parts/layers.py has changed" in done.stderr
    assert state(the_run(lab)) == before
    (lab / "lab_of_code" / "parts" / "layers.py").write_text(text)
    assert train().returncode == 0
    assert json.loads((the_run(lab) / "summary.json").read_text())["weights_sha256"] == weights

    (the_run(lab) / "summary.json").unlink()
    shutil.rmtree(the_run(lab) / "checkpoints" / "step-00000004")
    edit(lab / "lab_of_code" / "parts" / "layers.py")
    assert train("reproducibility.other_environment=record").returncode == 0
    summary = json.loads((the_run(lab) / "summary.json").read_text())
    assert summary["level"] == "none"
    assert summary["weights_sha256"] != weights


def test_a_run_from_before_code_was_recorded_answers_as_it_did(train, lab):
    assert train().returncode == 0
    (the_run(lab) / "sources.json").unlink()
    edit(lab / "lab_of_code" / "net.py")
    assert "already finished" in train().stdout


def test_the_same_code_elsewhere_is_the_same(train, lab, monkeypatch):
    assert train().returncode == 0
    monkeypatch.chdir(lab.rename(lab.with_name("moved")))
    assert "already finished" in train().stdout
    edit(lab.with_name("moved") / "lab_of_code" / "net.py")
    assert "lab_of_code/net.py has changed" in train().stderr


def test_verify_eval_and_diff_say_that_the_code_differs(train, samewise, lab, tmp_path):
    assert train().returncode == 0
    first = the_run(lab)
    forget()
    assert "code differs" not in samewise("verify", first).stdout
    edit(lab / "lab_of_code" / "parts" / "layers.py")
    forget()
    done = samewise("verify", first)
    assert done.returncode == 1
    assert "the code differs: lab_of_code/parts/layers.py has changed" in done.stdout
    assert "diverges at step 1" in done.stdout
    forget()
    assert "layers.py has changed; the run was trained with the earlier version" in samewise("eval", first).stderr
    assert train("name=edited", f"run_root={tmp_path}/other").returncode == 0
    (second,) = (tmp_path / "other").glob("*/*/")
    assert "differs in lab_of_code/parts/layers.py" in samewise("diff", first, second).stdout


def test_a_finished_run_whose_code_has_changed_is_refused_without_importing_torch_or_the_code(train, lab, tmp_path):
    assert train().returncode == 0
    edit(lab / "lab_of_code" / "net.py")
    command = [sys.executable, "-X", "importtime", "-m", "samewise", "train", *TINY, *MODEL, f"run_root={tmp_path}/runs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert "lab_of_code/net.py has changed" in done.stderr
    imported = {name.split(".")[0] for name in re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE)}
    assert "samewise" in imported
    assert not imported & {"torch", "mlflow", "lab_of_code"}


def test_what_cannot_be_read_now_is_told_as_that(train, lab):
    assert train().returncode == 0
    file = lab / "lab_of_code" / "net.py"
    file.rename(lab / "kept")
    file.mkdir()
    assert "lab_of_code/net.py cannot be read (Is a directory)" in train().stderr


def test_a_sweep_does_not_take_runs_of_other_code_for_its_own(train, samewise, lab, tmp_path):
    for seed in (0, 1):
        assert train(f"seed={seed}").returncode == 0
    sweep = ["sweep", *TINY, *MODEL, f"run_root={tmp_path}/runs", "seed=0,1"]
    forget()
    assert "2 points, 0 to run" in samewise(*sweep).stderr
    edit(lab / "lab_of_code" / "net.py")
    forget()
    done = samewise(*sweep)
    assert done.returncode == 2, done.stdout
    assert "lab_of_code/net.py has changed" in done.stderr
