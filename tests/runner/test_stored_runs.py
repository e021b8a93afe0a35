"""`samewise runs --uri`: the runs in an MLflow store, in the same table as those on disk."""

import http.server
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import samewise as in_python
from samewise.runner.config.schema import Tracking
from samewise.runner.records import header
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.sources import code_name
from samewise.runner.tracking.tracker import open_tracker

ACCURACIES = {"0123456789ab": (0.5, 0.9, 0.7), "fedcba987654": (0.4, 0.6, 0.8)}


@pytest.fixture
def store(samewise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with two of samewise's runs, one of them interrupted, and one of another tool."""
    monkeypatch.chdir(tmp_path)
    for number, (name, values) in enumerate(ACCURACIES.items()):
        folder = RunFolder(tmp_path / "runs" / "tried" / name)
        folder.create()
        settings = OmegaConf.to_container(OmegaConf.structured(Tracking(uri="sqlite:///runs/mlflow.db", experiment="tried")))
        config = {"seed": number, "run_root": f"elsewhere{number}", "evaluate": {"monitor": "valid/accuracy", "mode": "max"}, "tracking": settings}
        folder.config.write_text(header.write({"dataset": "digits"}, f"seed={number}") + OmegaConf.to_yaml(config))
        folder.environment.write_text(json.dumps({"fingerprint": name * 5, "total_steps": 30}))
        if number:
            folder.sources.write_text(json.dumps({"files": {"lab/net.py": {"": "0" * 16}}}))
        tracker = open_tracker(folder, OmegaConf.structured(Tracking(enabled=False)), resume_step=None)
        tracker.start()
        for step, value in enumerate(values, start=1):
            tracker.log({"train/loss": 1.0, "valid/accuracy": value, "valid/loss": 1 - value}, 10 * step)
        if number:
            tracker.log({"train/loss": 1.0}, 35)  # stopped after that
        tracker.finish("KILLED" if number else "FINISHED")
    assert samewise("sync").returncode == 0
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri="sqlite:///runs/mlflow.db")
    client.create_run(client.create_experiment("another's"))
    return "sqlite:///runs/mlflow.db"


def test_stored_runs_are_listed_with_overrides_differences_and_best_value(samewise: Callable[..., Any], store: str) -> None:
    done = samewise("runs", "--uri", store, "--sort", "valid/accuracy", "--diff", "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["name"], first["run"], first["label"], first["state"], first["step"], first["steps"]) == (
        "tried",
        "0123456789ab",
        "seed=0",
        "finished",
        30,
        30,
    )
    assert (first["monitor"], first["value"], first["metrics"]) == ("valid/accuracy", 0.9, {"valid/accuracy": 0.9, "valid/loss": pytest.approx(0.1)})
    assert (second["label"], second["state"], second["value"], second["step"]) == ("seed=1", "interrupted", 0.8, 35)
    code = code_name(RunFolder(Path(second["folder"])).sources)
    assert len(code) == 7
    assert first["differs"] == {"code": "", "seed": "0"}
    assert second["differs"] == {"code": code, "seed": "1"}
    from mlflow import MlflowClient

    (found,) = MlflowClient(tracking_uri=store).search_runs(["1"], f"tags.`samewise.code` = '{code}'")
    assert found.data.tags["samewise.folder"] == second["folder"]
    assert "1 runs in the store are not samewise's" in done.stderr
    table = samewise("runs", "--uri", store, "--where", "state=finished").stdout
    assert "seed=0" in table
    assert "seed=1" not in table
    assert in_python.runs(uri=store, diff=True).sort_values("seed")["valid/accuracy"].tolist() == [0.9, 0.8]


class Gateway(http.server.BaseHTTPRequestHandler):
    """Answers everything with the same text."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"200 OK")

    do_POST = do_GET


def test_a_gateway_that_answers_ok_is_no_mlflow_server(samewise: Callable[..., Any]) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        done = samewise("runs", "--uri", f"http://127.0.0.1:{gateway.server_address[1]}")
        gateway.shutdown()
    assert done.returncode == 2
    assert "it is no MLflow server" in done.stderr
