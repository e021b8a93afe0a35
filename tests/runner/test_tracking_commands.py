import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf
from samewise_runner_keeping import keeper

from samewise.runner.bundles.received import open_received
from samewise.runner.cli import main
from samewise.runner.config.schema import Tracking
from samewise.runner.records import checkpoint, shards
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trust import is_signed, sign
from samewise.runner.tracking.tracker import open_tracker


@pytest.fixture
def unsent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that MLflow does not know, as if its store had been unavailable."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "tried" / "0123456789ab")
    folder.create()
    settings = Tracking(uri="sqlite:///runs/mlflow.db", experiment="tried")
    folder.config.write_text(OmegaConf.to_yaml(OmegaConf.create({"seed": 3, "tracking": OmegaConf.structured(settings)})))
    tracker = open_tracker(folder, OmegaConf.structured(Tracking(enabled=False)), resume_step=None)
    tracker.start()
    for step in range(1, 6):
        tracker.log({"train/loss": 1 / step}, step)
    tracker.finish("FINISHED")
    return folder


def test_sync_sends_what_is_missing_only_once(unsent: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["run"], said["state"], said["metrics"]) == ("tried/0123456789ab", "sent", 5)
    connection = sqlite3.connect(unsent.path.parents[1] / "mlflow.db")
    assert connection.execute("select status, run_uuid from runs").fetchall() == [("FINISHED", said["mlflow_run_id"])]
    assert connection.execute("select step, value from metrics order by step").fetchall() == [(step, 1 / step) for step in range(1, 6)]
    connection.close()
    assert main(["sync", "0123", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == 0


def test_evaluations_in_the_summary_reach_mlflow_once(unsent: RunFolder) -> None:
    evaluation = {"step": 4, "samples": 10, "time_ms": 1_700_000_000_000, "metrics": {"test/accuracy": 0.5, "test/loss": "NaN"}}
    summary = {"status": "finished", "level": "R2", "weights_sha256": "0" * 64, "steps": 5, "timings": {"training_s": 1, "step_ms": 1}}
    for samples in (10, 11):
        evaluation["samples"] = samples
        metrics = {"final": {}, "best": {"step": 4}, "monitor": "valid/loss"}
        unsent.summary.write_text(json.dumps({**summary, "metrics": metrics, "evaluations": {"test-00000004": evaluation}}))
        assert main(["sync"]) == 0
    connection = sqlite3.connect(unsent.path.parents[1] / "mlflow.db")
    assert connection.execute("select key, step, value, is_nan from metrics where key like 'test/%' order by key").fetchall() == [
        ("test/accuracy", 4, 0.5, 0),
        ("test/loss", 4, 0.0, 1),
    ]
    connection.close()


def test_a_name_and_tags_reach_mlflow_at_once_or_with_sync(unsent: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    def stored() -> tuple[str, str | None, str | None]:
        run = MlflowClient(tracking_uri=f"sqlite:///{unsent.path.parents[1]}/mlflow.db").get_run(json.loads(unsent.tracking.read_text())["run_id"])
        return run.info.run_name, run.data.tags.get("team"), run.data.tags.get("draft")

    assert main(["runs", "tag", "0123", "team=vision", "draft=yes"]) == 0
    assert stored() == ("tried-0123456789ab", "vision", "yes")
    assert main(["runs", "rename", "0123", "raccoon"]) == 0
    assert main(["runs", "tag", "raccoon", "~draft"]) == 0
    assert stored() == ("raccoon", "vision", None)
    # A store that cannot be reached
    shutil.move(unsent.path.parents[1] / "mlflow.db", "elsewhere.db")
    (unsent.path.parents[1] / "mlflow.db").write_text("no store" * 1000)
    assert main(["runs", "rename", "raccoon", ""]) == 0
    assert "samewise sync" in capsys.readouterr().err
    shutil.move("elsewhere.db", unsent.path.parents[1] / "mlflow.db")
    assert main(["sync"]) == 0
    assert stored() == ("tried-0123456789ab", "vision", None)


def test_a_sharded_checkpoint_is_restored_whole_from_the_store(unsent: RunFolder) -> None:
    made = keeper(unsent.checkpoints, keep_last=1, keep_best=0)
    inner = made.shards_folder(5)
    shards.save({"/model/weight": torch.arange(6.0)}, inner)
    state = {"model": {"weight": {shards.KEY: "/model/weight", "shape": [6], "dtype": "float32"}}, "shards": shards.digests(inner, 0)}
    made.save(5, state, {})
    assert main(["sync"]) == 0
    run_id = json.loads(unsent.tracking.read_text())["run_id"]
    shutil.rmtree(unsent.path)
    with open_received(run_id, run_root=Path("runs")) as folder:
        (kept,) = folder.checkpoints.iterdir()
        assert torch.equal(checkpoint.load(kept)["model"]["weight"], torch.arange(6.0))


@pytest.mark.slow
def test_a_model_is_logged_and_registered_once_and_contains_only_data(unsent: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    unsent.config.write_text(unsent.config.read_text() + "recipe: {_target_: samewise.recipes.detection.Detection}\n")
    sign(unsent.config)
    kept = unsent.checkpoints / "step-00000005"
    kept.mkdir(parents=True)
    (kept / "state.pt").write_bytes(b"weights")
    (unsent.checkpoints / "best").symlink_to(kept.name)
    for name in ("digits", "digits", "others"):
        assert main(["sync", "0123", "--register", name, "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({one["model"] for one in said}) == 1
    assert said[-1]["registered"] == {"digits": "1", "others": "1"}
    (model,) = unsent.path.parents[1].glob("mlartifacts/models/*/artifacts")
    assert not {file.suffix for file in model.rglob("*") if file.is_file()} - {"", ".json", ".yaml", ".txt", ".pt"}
    assert (model / "run" / "checkpoints" / kept.name / "state.pt").read_bytes() == b"weights"
    assert is_signed(model / "run" / "config.yaml")
    assert json.loads((model / "serving_input_example.json").read_text())["dataframe_split"]["data"][0][1] == "grey.png"
    assert not list(unsent.path.glob(".model-*"))


def test_the_model_of_an_unfinished_run_is_not_logged(unsent: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = open_tracker(unsent, OmegaConf.structured(Tracking(enabled=False)), resume_step=5)
    tracker.start()
    tracker.finish("KILLED")
    assert main(["sync", "0123", "--log-model"]) == 0
    said = capsys.readouterr()
    assert "has not finished, so its model is not logged" in said.err
    assert "models:/" not in said.out


def test_sync_leaves_a_run_to_its_own_sender(unsent: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    from samewise.runner.records.locks import hold

    with hold(unsent.sending):
        assert main(["sync"]) == 1
        assert "training has ended, and its own process is still sending" in capsys.readouterr().out
        with unsent.hold_lock():
            assert main(["sync"]) == 0
        assert "in progress" in capsys.readouterr().out


def test_ui_refuses_a_taken_port(unsent: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (unsent.path.parents[1] / "mlflow.db").write_bytes(b"SQLite format 3\0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["ui", "--port", str(taken.getsockname()[1])]) == 2
    assert "the port is taken" in capsys.readouterr().err


@pytest.mark.slow
def test_ui_serves_the_store_and_ends_with_ctrl_c(unsent: RunFolder) -> None:
    assert main(["sync"]) == 0
    command = [sys.executable, "-m", "samewise", "ui"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=unsent.path.parents[2])
    assert process.stdout is not None
    address = process.stdout.readline().split()[2].partition("/#")[0]
    with urllib.request.urlopen(f"{address}/ajax-api/2.0/mlflow/experiments/search?max_results=10", timeout=30) as answer:
        assert {experiment["name"] for experiment in json.load(answer)["experiments"]} == {"Default", "tried"}
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert not psutil.wait_procs(family, timeout=10)[1]
