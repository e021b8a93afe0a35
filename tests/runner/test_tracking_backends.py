"""TensorBoard, Weights & Biases and metrics.csv, read back by their own readers: each value once, whatever was killed; missing and unknown backends are reported."""

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from omegaconf import OmegaConf
from PIL import Image

from samewise.runner.cli import main
from samewise.runner.config.schema import Tracking
from samewise.runner.errors import ConfigError
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.journal import Journal
from samewise.runner.tracking.metrics_csv import MetricsCsv
from samewise.runner.tracking.tracker import open_tracker

Points = dict[str, list[tuple[int, float]]]


def by_tensorboard(folder: RunFolder) -> tuple[Points, list[str]]:
    """The scalars, and the names of the pictures, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, EventAccumulator

    found = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={SCALARS: 0, IMAGES: 0}).Reload()
    names: dict[str, Any] = found.Tags()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in names["scalars"]}, names["images"]


def by_wandb(folder: RunFolder) -> tuple[Points, dict[str, Any]]:
    """The values of all offline files by `step`, and the config."""
    from wandb.proto import wandb_internal_pb2

    internal: Any = wandb_internal_pb2
    points, config = Points(), dict[str, Any]()
    for path in sorted(folder.path.glob("wandb/offline-run-*/*.wandb")):
        for raw in records(path.read_bytes()):
            record = internal.Record()
            record.ParseFromString(raw)
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            row = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
            for name, value in row.items():
                if name.startswith("train/"):
                    points.setdefault(name, []).append((row["step"], float(value)))
    return points, config


def records(raw: bytes) -> list[bytes]:
    """The records of a .wandb file: LevelDB's log format, in blocks of 32 KiB, after a header of 7 bytes; a torn last record is left out."""
    found, parts, at = list[bytes](), b"", 7
    while at + 7 <= len(raw):
        if (left := -at % 32768) < 7 and left:
            at += left
        length, kind = struct.unpack_from("<HB", raw, at + 4)
        parts += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found, parts = [*found, parts], b""
    return found


def make_run(path: Path, **settings: Any) -> RunFolder:
    """A run that logged five steps, with settings that do not report anywhere yet."""
    folder = RunFolder(path / "runs" / "tried" / "0123456789ab")
    folder.create()
    config = {"seed": 3, "optimizer": {"lr": 0.1}, "tracking": OmegaConf.structured(Tracking(uri="sqlite:///runs/mlflow.db", experiment="tried", **settings))}
    folder.config.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    log(folder, range(1, 6), resume=None)
    (folder.artifacts / "valid").mkdir()
    Image.fromarray(np.zeros((3, 4, 3), np.uint8)).save(folder.artifacts / "valid" / "seen.png")
    return folder


def log(folder: RunFolder, steps: range, *, resume: int | None) -> None:
    journal = Journal(folder.metrics, resume_step=resume)
    journal.status("RUNNING")
    for step in steps:
        journal.log({"train/loss": 1 / step}, step)
    journal.status("FINISHED")
    journal.close()


def test_tensorboard_shows_each_value_once_however_often_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path)
    for sent in ("5 metrics and 1 file", "0 metrics and 0 files"):
        assert main(["sync", "--to", "tensorboard"]) == 0
        assert f"sent {sent} to TensorBoard" in capsys.readouterr().out
    assert len(list((folder.path / "tensorboard").iterdir())) == 1
    log(folder, range(3, 9), resume=3)  # a run that was killed, and resumed from step 3
    for sent in ("8 metrics and 1 file", "0 metrics and 0 files"):
        assert main(["sync", "--to", "tensorboard"]) == 0
        assert f"sent {sent} to TensorBoard" in capsys.readouterr().out
    points, pictures = by_tensorboard(folder)
    assert points["train/loss"] == [(step, float(np.float32(1 / step))) for step in range(1, 9)]
    assert pictures == ["valid/seen"]
    assert sum(1 for path in (folder.path / "tensorboard").iterdir() if path.stat().st_size) == 1


def by_pandas(folder: RunFolder) -> tuple[Points, list[str]]:
    """The rows of metrics.csv, and its columns, as users of Lightning's CSVLogger read them."""
    table = pandas.read_csv(folder.path / "metrics.csv")
    points = {name: table[["step", name]].dropna() for name in table if name != "step"}
    return {str(name): list(zip(rows["step"], rows[name], strict=True)) for name, rows in points.items()}, list(table)


def test_metrics_csv_has_a_row_for_each_step_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_run(tmp_path)
    backend = MetricsCsv(folder)
    assert backend.synchronise(alive=True).metrics == 5
    with open(folder.metrics, "ab") as journal:  # a process that was killed within a line, and resumes from step 3
        journal.write(b'{"step": 6, "time_ms": 17')
    log(folder, range(3, 9), resume=3)
    journal = Journal(folder.metrics, resume_step=8)
    journal.log({"valid/loss": 0.1 + 0.2, "a, b": math.nan}, 8)  # a new column, of the same step
    journal.close()
    assert backend.synchronise(alive=False).metrics == 10
    points, columns = by_pandas(folder)
    assert columns == ["a, b", "step", "train/loss", "valid/loss"]
    assert points["train/loss"] == [(step, 1 / step) for step in range(1, 9)]
    assert points["valid/loss"] == [(8, 0.1 + 0.2)]
    whole = (folder.path / "metrics.csv").read_bytes()
    assert main(["sync", "--to", "csv"]) == 0
    assert (folder.path / "metrics.csv").read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "read"), [("tensorboard", by_tensorboard), ("wandb", by_wandb), ("csv", by_pandas)])
def test_a_killed_sender_loses_nothing(tmp_path: Path, backend: str, read: Callable[[RunFolder], tuple[Points, Any]]) -> None:
    folder = make_run(tmp_path, enabled=True, report_to=[backend])
    settings = OmegaConf.to_container(OmegaConf.structured(Tracking(experiment="tried", report_to=[backend], log_system=False, send_every_s=0.1)))
    for last in (False, True):
        command = [sys.executable, "-m", "samewise.runner.tracking.sender", str(folder.path), "--trainer", str(os.getpid())]
        sender = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "WANDB_MODE": "offline"}, start_new_session=True)
        assert sender.stdin is not None
        sender.stdin.write(json.dumps(settings).encode() + b"\n")
        sender.stdin.flush()
        if last:
            sender.stdin.write(b"end\n")
            sender.stdin.close()
            assert sender.wait(60) == 0
        else:
            marks = {"tensorboard": "tensorboard/events.*", "wandb": "wandb.json", "csv": "metrics.csv"}
            while not list(folder.path.glob(marks[backend])):
                assert sender.poll() is None
                time.sleep(0.05)
            os.killpg(sender.pid, signal.SIGKILL)
            sender.wait()
            log(folder, range(6, 9), resume=6)
    points, _ = read(folder)
    assert dict(points["train/loss"]) == pytest.approx({step: 1 / step for step in range(1, 9)})
    assert len(points["train/loss"]) == 8 or backend == "wandb"  # to which everything that a killed sender had sent is sent again


@pytest.mark.slow
def test_wandb_offline_has_all_values_and_the_config_without_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = make_run(tmp_path, tags={"api_key": "hunter2", "who": "me"})
    for _ in range(2):
        assert main(["sync", "--to", "wandb"]) == 0
    points, config = by_wandb(folder)
    assert points["train/loss"] == [(step, 1 / step) for step in range(1, 6)]
    assert config["optimizer"] == {"lr": 0.1}
    assert not [path for path in folder.path.glob("wandb/**/*") if path.is_file() and b"hunter2" in path.read_bytes()]


@pytest.mark.parametrize(("backend", "link"), [("tensorboard", "tensorboard"), ("tensorboard", "tensorboard/events.out.tfevents.1"), ("wandb", "wandb")])
def test_nothing_is_written_through_a_link(backend: str, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, theirs = make_run(tmp_path), tmp_path / "theirs"
    if "/" in link:
        theirs.write_text("kept")
        (folder.path / link).parent.mkdir()
    else:
        theirs.mkdir()
    (folder.path / link).symlink_to(theirs)
    assert main(["sync", "--to", backend]) != 0
    assert theirs.read_text() == "kept" if theirs.is_file() else not list(theirs.iterdir())


def test_an_unknown_or_missing_backend_is_reported_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"tracking.report_to: is not a tracking backend; hint: did you mean 'tensorboard'"):
        open_tracker(folder, OmegaConf.structured(Tracking(uri="sqlite:///runs/mlflow.db", report_to=["tensorbord"])), resume_step=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(ConfigError, match=r"(?s)needs the package wandb.*pip install '\.\[wandb\]' in samewise's folder"):
        open_tracker(folder, OmegaConf.structured(Tracking(uri="sqlite:///runs/mlflow.db", report_to=["wandb"])), resume_step=None)


def test_an_experiment_of_somebody_else_may_not_report_to_the_users_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text("# @package _global_\ndefaults: [resnet18_digits, _self_]\ntracking: {report_to: [wandb]}\n")
    assert main(["check", "--static", "--config-dir", str(tmp_path), "experiment=theirs"]) == 2
    assert "tracking.report_to" in capsys.readouterr().err
