"""Failures while training: a readable message, exit code 1, nothing damaged, and the same command resumes."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import samewise_runner_promise as promise
from samewise_tiny import DIGITS

from samewise.runner.records.locks import LockHeld, hold, holder

TINY = [*DIGITS, "model.width=8"]


@pytest.fixture
def train(samewise):
    return lambda run_root, *overrides: samewise("train", *TINY, f"run_root={run_root}", *overrides)


def the_run(run_root: Path) -> Path:
    (folder,) = run_root.glob("*/*/")
    return folder


def test_a_nonfinite_loss_names_its_step_and_keeps_the_previous_checkpoint(train, tmp_path):
    done = train(tmp_path, "optimizer.lr=1e30", "checkpoint.every_steps=1")
    assert done.returncode == 1
    assert "loss is not finite" in done.stderr
    assert "learning rate" in done.stderr
    assert "step 2" in done.stderr
    assert [path.name for path in the_run(tmp_path).glob("checkpoints/step-*")] == ["step-00000001"]
    assert json.loads((the_run(tmp_path) / "failure.json").read_text())["step"] == 1
    assert not (the_run(tmp_path) / "summary.json").exists()


def test_damaged_checkpoints_are_named_and_the_previous_one_is_used(train, tmp_path):
    whole = train(tmp_path / "whole", "max_steps=8")
    assert whole.returncode == 0, whole.stderr
    assert not list((the_run(tmp_path / "whole") / "artifacts").rglob("*.png"))  # as evaluate.pictures=false asks
    expected = json.loads((the_run(tmp_path / "whole") / "summary.json").read_text())["weights_sha256"]

    assert train(tmp_path / "cut", "max_steps=8", "checkpoint.every_steps=3", "checkpoint.keep_last=5").returncode == 0
    folder = the_run(tmp_path / "cut")
    (folder / "summary.json").unlink()
    for step in (8, 6):
        state = folder / f"checkpoints/step-{step:08d}/state.pt"
        data = bytearray(state.read_bytes())
        data[len(data) // 3] ^= 4
        state.write_bytes(data if step == 8 else data[:1000])
    done = train(tmp_path / "cut", "max_steps=8", "checkpoint.every_steps=3", "checkpoint.keep_last=5")
    assert done.returncode == 0, done.stderr
    assert "step-00000008" in done.stderr
    assert "cut short or altered" in done.stderr
    assert json.loads((folder / "summary.json").read_text())["weights_sha256"] == expected
    assert (folder / "trace.jsonl").read_bytes() == (the_run(tmp_path / "whole") / "trace.jsonl").read_bytes()
    assert (folder / "checkpoints/damaged-step-00000006/state.pt").stat().st_size == 1000
    assert str(folder / "checkpoints/damaged-step-00000006") in done.stderr


@pytest.mark.parametrize("trouble", ["/proc/self/mem", pytest.param("nowhere", marks=pytest.mark.slow)])
def test_unreadable_checkpoints_stop_the_command_until_they_can_be_read(train, tmp_path, trouble):
    """Reading /proc/self/mem gives EIO; a link to nowhere stands for a missing file."""
    settings = ("max_steps=4", "checkpoint.every_steps=2")
    assert train(tmp_path, *settings).returncode == 0
    folder = the_run(tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    files = [folder / f"checkpoints/step-{step:08d}/state.pt" for step in (2, 4)]
    for file in files:
        file.rename(file.with_name("kept"))
        file.symlink_to(trouble)
    trace = (folder / "trace.jsonl").read_bytes()
    done = train(tmp_path, *settings)
    assert done.returncode == 2, done.stderr
    assert "step-00000002" in done.stderr
    assert "step-00000004" in done.stderr
    assert "nothing has been deleted" in done.stderr
    assert (folder / "trace.jsonl").read_bytes() == trace
    for file in files:
        file.with_name("kept").rename(file)
    assert train(tmp_path, *settings).returncode == 0
    assert json.loads((folder / "summary.json").read_text())["weights_sha256"] == summary["weights_sha256"]
    assert (folder / "trace.jsonl").read_bytes() == trace


def test_two_processes_cannot_write_one_run(train, tmp_path):
    import fcntl

    assert train(tmp_path, "max_steps=2").returncode == 0
    folder = the_run(tmp_path)
    (folder / "summary.json").unlink()
    with open(folder / ".lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        done = train(tmp_path, "max_steps=2")
    assert done.returncode == 2
    assert "is being written by" in done.stderr


@pytest.mark.slow
def test_other_data_in_the_same_folder_is_refused(train, tmp_path):
    pictures = [make_pictures(tmp_path / name, shade) for name, shade in (("one", 0), ("two", 90))]
    settings = [
        *("dataset=image_folder", "max_epochs=1", "dataset.num_classes=2", "dataset.image_size=8", "model.in_channels=3", "transforms=images", "max_steps=2"),
        "batch_size=4",
    ]
    first = train(tmp_path / "runs", *settings, f"dataset.root={pictures[0]}")
    assert first.returncode == 0, first.stderr
    again = train(tmp_path / "runs", *settings, f"dataset.root={pictures[0]}")
    assert "nothing to train" in again.stdout
    assert "other data" not in again.stderr
    other = train(tmp_path / "runs", *settings, f"dataset.root={pictures[1]}")
    assert other.returncode == 2
    assert "on other data" in other.stderr
    assert "name=" in other.stderr


def make_pictures(root: Path, shade: int) -> Path:
    from PIL import Image

    for split in ("train", "valid"):
        for name, value in (("dark", 40), ("light", 160)):
            (root / split / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (8, 8), (value + shade, number, 0)).save(root / split / name / f"{number}.png")
    return root


@pytest.mark.slow  # test_checkpoint_writing.py fills a disk in-process
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_ends_training_and_it_resumes_with_more_room(train, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("this sandbox may not mount a file system")
    try:
        full = train(disk / "runs", "model.width=16", "checkpoint.every_steps=2", "checkpoint.background=false")
        assert full.returncode == 1
        assert "No space left" in full.stderr or "disk is full" in full.stderr
        assert "run the same command again" in full.stderr
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        done = train(disk / "runs", "model.width=16", "checkpoint.every_steps=2", "checkpoint.background=false")
        assert done.returncode == 0, done.stderr
        assert not (the_run(disk / "runs") / "failure.json").exists()
        plain = train(tmp_path / "plain", "model.width=16")
        assert json.loads((the_run(disk / "runs") / "summary.json").read_text())["weights_sha256"] in (the_run(tmp_path / "plain") / "summary.json").read_text()
        assert plain.returncode == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_ctrl_c_is_answered_at_once_and_the_run_is_saved(tmp_path):
    process = promise.Promise(TINY).start(tmp_path, "max_steps=4000", "max_epochs=4000")
    while promise.trace_lines(tmp_path) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send(signal.SIGINT)
    assert process.wait(100) == 3
    assert process.errors.index("Stopping after this step and saving") < process.errors.index("stopped by SIGINT, and saved")


def test_a_lock_names_the_process_that_holds_it(tmp_path):
    path = tmp_path / ".lock"
    assert holder(path) is None
    with hold(path), pytest.raises(LockHeld, match=f"process {os.getpid()} on "), hold(path):
        pass
    assert holder(path) is None
    with hold(path):
        pass


@pytest.mark.parametrize("again", [False, True])
def test_a_holder_learns_that_its_folder_was_deleted(tmp_path, again):
    folder = tmp_path / "run"
    folder.mkdir()
    with hold(folder / ".lock") as is_gone:
        assert not is_gone()
        shutil.rmtree(folder)
        if again:
            folder.mkdir()
            (folder / ".lock").touch()
        assert is_gone()


ENDING = [
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
def train_lab(samewise, lab):
    def run(*overrides: str, command: str = "train"):
        done = samewise(command, "--package", "lab_that_ends", *ENDING, f"run_root={lab}/runs", "name=lab", *overrides)
        return done, next((lab / "runs" / "lab").glob("*/"), lab / "none")

    return run


def model(**arguments: object) -> list[str]:
    told = {"_target_": "lab_that_ends.Net", **arguments}
    return ["~model", "+model={" + ",".join(f"{name}:{value}" for name, value in told.items()) + "}"]


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_constructor_that_ends_the_process_is_reported_with_its_location(train_lab, command):
    done, folder = train_lab(*model(leave="when made"), command=command)
    assert done.returncode == 2, done.stdout
    assert "model: Net ends the process: sys.exit(0)" in done.stderr
    assert "lab_that_ends.py:" in done.stderr
    assert not folder.exists()


def test_a_module_that_ends_the_process_on_import_is_reported_with_its_location(train_lab, lab):
    (lab / "lab_that_ends.py").write_text("import sys\nsys.exit()\n")
    done, _ = train_lab(*model())
    assert done.returncode == 2, done.stdout
    assert "lab_that_ends.py:2" in done.stderr


@pytest.mark.parametrize(("command", "after"), [("train", 1), ("train", 3), ("check", 1)])
def test_a_model_that_ends_the_process_in_training_is_reported_with_its_location(train_lab, command, after):
    done, folder = train_lab(*model(leave="in training", after=after), command=command)
    assert done.returncode == (2 if after == 1 else 1), done.stdout
    assert "sys.exit(None)" in done.stderr
    assert "lab_that_ends.py:" in done.stderr
    assert "in forward" in done.stderr
    assert not (folder / "summary.json").exists()
    assert command == "check" or json.loads((folder / "failure.json").read_text())["step"] == after - 1


@pytest.mark.parametrize(("command", "workers"), [("train", 0), ("train", 1), ("check", 0)])
def test_a_data_set_that_ends_the_process_is_reported_with_its_location(train_lab, command, workers):
    leaving = ["~dataset.train", "+dataset.train={_target_:lab_that_ends.Leaving}"]
    done, folder = train_lab(*model(), *leaving, f"loader.num_workers={workers}", command=command)
    assert done.returncode == 2, done.stdout
    assert "Leaving ends the process: sys.exit(0)" in done.stderr
    assert "lab_that_ends.py:" in done.stderr
    assert not (folder / "summary.json").exists()


@pytest.mark.parametrize(("what", "step"), [("run", 3), ("run", 6), ("taken by another", 3)])
def test_a_run_whose_folder_is_deleted_fails_and_does_not_recreate_it(train_lab, what, step):
    done, folder = train_lab(*model(), f"+callbacks.deletes={{_target_:lab_that_ends.Deletes,what:{what},step:{step}}}")
    assert done.returncode == 1, done.stdout
    assert "the run's folder is gone" in done.stderr
    assert "finished" not in done.stdout
    left = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    assert left == ([] if what == "run" else [folder / ".lock"])
