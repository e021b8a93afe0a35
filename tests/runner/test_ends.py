"""An incomplete run is never called finished: a component may end the process, the folder may be deleted."""

import json

import pytest

TINY = [
    *("dataset=digits", "transforms=images", "debug=tiny", "tracking=none", "evaluate.pictures=false", "checkpoint.every_steps=1", "max_steps=6"),
    "checkpoint.background=false",
]
LAB = """
import shutil
import sys

import torch
from samewise.datasets.digits import Digits
from samewise.runner.interfaces import Callback
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Module):
    def __init__(self, leave="", after=3):
        super().__init__()
        self.head, self.leave = nn.Linear(64, 10), leave
        self.register_buffer("left", torch.tensor(after))
        if leave == "when made":
            sys.exit(0)

    def forward(self, pixels):
        self.left -= int(self.training)
        if self.leave == "in training" and not self.left:
            sys.exit()
        return self.head(pixels.flatten(1))

class Leaving(Dataset):
    def __init__(self):
        self.digits = Digits(split="train")

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        if index % 10 == 7:
            sys.exit(0)
        return self.digits[index]

from samewise.runner.records.folder import RunFolder

class Deletes(Callback):
    def __init__(self, what, step):
        self.what, self.step = what, step

    def on_step(self, run, outcome):
        if outcome.step == self.step:
            shutil.rmtree(run.folder / ("checkpoints" if self.what == "checkpoints" else ""))
            if self.what == "taken by another":
                RunFolder(run.folder).create()

"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    (tmp_path / "lab_that_ends.py").write_text(LAB)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def train(samewise, lab):
    def run(*overrides: str, command: str = "train"):
        done = samewise(command, "--package", "lab_that_ends", *TINY, f"run_root={lab}/runs", "name=lab", *overrides)
        return done, next((lab / "runs" / "lab").glob("*/"), lab / "none")

    return run


def model(**arguments: object) -> list[str]:
    told = {"_target_": "lab_that_ends.Net", **arguments}
    return ["~model", "+model={" + ",".join(f"{name}:{value}" for name, value in told.items()) + "}"]


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_constructor_that_ends_the_process_is_reported_with_its_location(train, command):
    done, folder = train(*model(leave="when made"), command=command)
    assert done.returncode == 2, done.stdout
    assert "model: Net ends the process: sys.exit(0)" in done.stderr
    assert "lab_that_ends.py:" in done.stderr
    assert not folder.exists()


def test_a_module_that_ends_the_process_on_import_is_reported_with_its_location(train, lab):
    (lab / "lab_that_ends.py").write_text("import sys\nsys.exit()\n")
    done, _ = train(*model())
    assert done.returncode == 2, done.stdout
    assert "lab_that_ends.py:2" in done.stderr


@pytest.mark.parametrize(("command", "after"), [("train", 1), ("train", 3), ("check", 1)])
def test_a_model_that_ends_the_process_in_training_is_reported_with_its_location(train, command, after):
    done, folder = train(*model(leave="in training", after=after), command=command)
    assert done.returncode == (2 if after == 1 else 1), done.stdout
    assert "sys.exit(None)" in done.stderr
    assert "lab_that_ends.py:" in done.stderr
    assert "in forward" in done.stderr
    assert not (folder / "summary.json").exists()
    assert command == "check" or json.loads((folder / "failure.json").read_text())["step"] == after - 1


@pytest.mark.parametrize(("command", "workers"), [("train", 0), ("train", 1), ("check", 0)])
def test_a_data_set_that_ends_the_process_is_reported_with_its_location(train, command, workers):
    leaving = ["~dataset.train", "+dataset.train={_target_:lab_that_ends.Leaving}"]
    done, folder = train(*model(), *leaving, f"loader.num_workers={workers}", command=command)
    assert done.returncode == 2, done.stdout
    assert "Leaving ends the process: sys.exit(0)" in done.stderr
    assert "lab_that_ends.py:" in done.stderr
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize(("what", "step"), [("run", 3), ("run", 6), ("taken by another", 3)])
def test_a_run_whose_folder_is_deleted_fails_and_does_not_recreate_it(train, what, step):
    done, folder = train(*model(), f"+callbacks.deletes={{_target_:lab_that_ends.Deletes,what:{what},step:{step}}}")
    assert done.returncode == 1, done.stdout
    assert "the run's folder is gone" in done.stderr
    assert "finished" not in done.stdout
    left = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    assert left == ([] if what == "run" else [folder / ".lock"])
