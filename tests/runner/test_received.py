"""A run without its folder is verified from MLflow alone: config, environment, code, trace and checkpoint come from the store."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.tracking import tracker

TINY = ("experiment=resnet18_digits", "debug=tiny", "evaluate.pictures=false", "callbacks=none", "model.width=4", "max_steps=3", "tracking.log_system=false")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run root with a store but no run left, and the id of the MLflow run."""
    from samewise.runner.cli import main

    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracker, "_start", lambda *_: None)  # a sender takes seconds to start
        assert main(["train", *TINY, f"run_root={root}", "name=one"]) == 0
    assert main(["sync", "--run-root", str(root)]) == 0
    (folder,) = root.glob("one/*")
    run_id = json.loads((folder / "tracking.json").read_text())["run_id"]
    shutil.rmtree(root / "one")
    return root, run_id


@pytest.fixture
def store(trained: tuple[Path, str], tmp_path: Path) -> tuple[str, str]:
    """A copy of the store that a test may spoil, and the run's id."""
    copy = tmp_path / "runs"
    shutil.copytree(trained[0], copy)
    import sqlite3

    with sqlite3.connect(copy / "mlflow.db") as connection:
        connection.execute("update runs set artifact_uri = replace(artifact_uri, ?, ?)", (str(trained[0]), str(copy)))
    return f"sqlite:///{copy}/mlflow.db", trained[1]


def artifacts(store: tuple[str, str]) -> Path:
    (found,) = Path(store[0].removeprefix("sqlite:///")).parent.glob(f"mlartifacts/**/{store[1]}/artifacts")
    return found


@pytest.mark.slow
def test_a_run_is_verified_by_its_mlflow_id_alone_and_its_owner_needs_no_trust(samewise: Callable[..., Any], trained: tuple[Path, str]) -> None:
    root, run_id = trained
    done = samewise("verify", run_id, "--run-root", root, code=0)
    assert "the same bits: 3 of 3 steps compared, weights" in done.stdout
    other = samewise("verify", f"runs:/{run_id}", "--uri", f"sqlite:///{root}/mlflow.db", "--json", "optimizer.weight_decay=0.1")
    assert json.loads(other.stdout)["parts"]["stage"] == "weights"


def test_an_altered_artifact_is_found(samewise: Callable[..., Any], store: tuple[str, str]) -> None:
    summary = artifacts(store) / "summary.json"
    summary.write_text(summary.read_text().replace(json.loads(summary.read_text())["weights_sha256"], "0" * 64))
    done = samewise("verify", store[1], "--uri", store[0], code=1)
    assert "summary.json: weights_sha256 is recorded as '0000" in done.stdout
    state = artifacts(store) / "checkpoint" / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    done = samewise("verify", store[1], "--uri", store[0], code=1)
    assert "step 3: " in done.stdout


def test_a_config_of_somebody_else_from_a_store_is_not_used_unless_trusted(samewise: Callable[..., Any], store: tuple[str, str]) -> None:
    from samewise.runner.tracking import sending

    (artifacts(store) / sending.SIGNATURE).write_text("0" * 64)
    done = samewise("verify", store[1], "--uri", store[0], code=2)
    assert "--trust" in done.stderr
    assert samewise("verify", store[1], "--uri", store[0], "--trust", "--steps", 1).returncode == 0


def test_a_store_that_points_to_files_elsewhere_is_not_followed(samewise: Callable[..., Any], store: tuple[str, str]) -> None:
    import sqlite3

    with sqlite3.connect(store[0].removeprefix("sqlite:///")) as connection:
        connection.execute("update runs set artifact_uri = 's3://elsewhere/artifacts'")
    done = samewise("verify", store[1], "--uri", store[0], code=2)
    assert "s3://elsewhere" in done.stderr
