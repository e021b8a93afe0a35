"""A sweep folder made by someone else can be shown, but nothing that it names is started or asked until the user allows it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import DIGITS

TINY = (*DIGITS, "model.width=4", "max_steps=2")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for SLURM's commands that leave a mark."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol"):
        (folder / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/mark\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "mark"


def put_on_a_cluster(sweep: Path, **changes: Any) -> None:
    """Change the sweep as a stranger could, so that SLURM would be asked for its jobs."""
    file = sweep / "sweep.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "launcher": {"_target_": "samewise.runner.launchers.slurm.Slurm"}, **changes}))
    (sweep / "slurm").mkdir()
    (sweep / "slurm" / "0001.json").write_text(json.dumps({"points": [0, 1], "job": "1", "variables": [{}, {}]}))


def test_a_received_sweep_is_shown_but_its_launcher_runs_only_if_trusted(samewise, sweep, cluster) -> None:
    put_on_a_cluster(sweep)
    for given in (("sweep", sweep, "--status"), ("report", sweep)):
        done = samewise(*given)
        assert done.returncode == 0, done.stderr
        assert "Its launcher is not asked" in done.stderr
    for given in (("sweep", sweep, "--cancel"), ("sweep", sweep), ("sweep", sweep, "--list"), ("sweep", *TINY, "name=swept", "seed=0,1", "launcher.jobs=1")):
        done = samewise(*given)
        assert done.returncode == 2, done.stdout
        assert "--trust" in done.stderr
    assert not cluster.exists()
    samewise("sweep", sweep, "--status", "--trust")
    assert cluster.exists()


def test_a_copy_of_a_sweep_cannot_be_continued(samewise, home, sweep) -> None:
    shutil.copytree(sweep, home / "copy")
    mine = {file: file.stat().st_mtime_ns for file in sweep.rglob("*")}
    for given in (("sweep", "copy"), ("sweep", "copy", "--retry-failed"), ("sweep", "copy", "--list")):
        done = samewise(*given)
        assert done.returncode == 2, done.stdout
        assert "copy: is a copy, or was started in a folder other than the current one" in done.stderr
    assert {file: file.stat().st_mtime_ns for file in sweep.rglob("*")} == mine
