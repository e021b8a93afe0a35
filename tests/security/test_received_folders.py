"""A folder made by someone else can be read, but nothing that it names runs until the user allows it."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import DIGITS

from samewise.runner.records import trust

TINY = (*DIGITS, "model.width=4", "max_steps=2")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own package, with a data set that leaves a mark at the path that it is given."""
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "lab_of_mine.py").write_text(
        "from pathlib import Path\n"
        "from samewise.datasets.generated import GeneratedClassification\n"
        "class Cached(GeneratedClassification):\n"
        "    def __init__(self, cache, **given):\n"
        "        super().__init__(**given)\n"
        "        Path(cache).write_text('it ran')\n"
    )
    (folder / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab_of_mine"]\n')
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def received(run: Path, mark: Path) -> Path:
    """The run as a stranger hands it on: its config names a class of the user's, with the stranger's arguments."""
    text = (run / "config.yaml").read_text()
    text, count = re.subn(
        r"_target_: samewise.datasets.generated.GeneratedClassification\n( +)", rf"_target_: lab_of_mine.Cached\n\1cache: {mark}\n\1", text, count=0
    )
    assert count >= 2
    (run / "config.yaml").write_text(text)
    return run


@pytest.mark.parametrize("command", ["eval", pytest.param("predict", marks=pytest.mark.slow), pytest.param("verify", marks=pytest.mark.slow)])
def test_a_received_run_runs_nothing_until_trusted_and_trust_is_remembered(samewise, run, lab, picture, tmp_path, command) -> None:
    mark = tmp_path / "mark"
    received(run, mark)
    given = (command, run, *([picture] if command == "predict" else []), *(["--anyway"] if command == "verify" else []))
    done = samewise(*given, code=2)
    assert "is not signed by you: someone else made it, it was altered" in done.stderr
    assert "--trust" in done.stderr
    assert not mark.exists()
    trusted = samewise(*given, "--trust", code=0)
    assert mark.exists() or command == "predict"  # which needs no data
    assert samewise(*given).returncode == trusted.returncode
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n")  # trusted as it was
    assert samewise(*given).returncode == 2


@pytest.mark.parametrize("command", ["eval", "verify"])
def test_a_package_may_be_declared_for_a_single_command(samewise, run, lab, tmp_path, monkeypatch, command) -> None:
    received(run, mark := tmp_path / "mark")
    monkeypatch.chdir(lab.parent)  # where no pyproject.toml declares it
    given = (command, run, "--trust", *(["--anyway"] if command == "verify" else ["--to", "pt2", "--out", tmp_path / "out"] if command == "export" else []))
    assert "--package lab_of_mine" in samewise(*given).stderr
    assert not mark.exists()
    done = samewise(*given, "--package", "lab_of_mine")
    assert "outside the packages" not in done.stderr
    assert done.returncode == 0
    assert mark.exists()


def test_a_signature_made_with_another_key_is_not_valid(samewise, run, tmp_path, monkeypatch) -> None:
    mine = os.environ["XDG_CONFIG_HOME"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "stranger"))
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n")
    assert trust.sign(run / "config.yaml")
    assert trust.is_signed(run / "config.yaml")
    monkeypatch.setenv("XDG_CONFIG_HOME", mine)
    assert not trust.is_signed(run / "config.yaml")
    assert samewise("eval", run).returncode == 2


def test_commands_that_only_read_need_no_trust(samewise, run, sweep) -> None:
    (run / ".signature").unlink()
    (sweep / ".signature").unlink()
    for given in (("diff", run, run), ("digest", run), ("sweep", sweep, "--status"), ("sweep", "--status"), ("report", sweep)):
        samewise(*given, code=0)


def test_train_continues_an_unsigned_run_without_trust_and_signs_it(samewise, run) -> None:
    """`train` composes what it runs from the user's own command line."""
    (run / ".signature").unlink()
    assert samewise("train", *TINY, "name=one").returncode == 0
    (run / "summary.json").unlink()
    assert samewise("train", *TINY, "name=one").returncode == 0
    assert samewise("eval", run).returncode == 0  # written by this user now


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
        done = samewise(*given, code=0)
        assert "Its launcher is not asked" in done.stderr
    for given in (("sweep", sweep, "--cancel"), ("sweep", sweep), ("sweep", sweep, "--list"), ("sweep", *TINY, "name=swept", "seed=0,1", "launcher.jobs=1")):
        done = samewise(*given, code=2)
        assert "--trust" in done.stderr
    assert not cluster.exists()
    samewise("sweep", sweep, "--status", "--trust")
    assert cluster.exists()


def test_a_copy_of_a_sweep_cannot_be_continued(samewise, home, sweep) -> None:
    shutil.copytree(sweep, home / "copy")
    mine = {file: file.stat().st_mtime_ns for file in sweep.rglob("*")}
    for given in (("sweep", "copy"), ("sweep", "copy", "--retry-failed"), ("sweep", "copy", "--list")):
        done = samewise(*given, code=2)
        assert "copy: is a copy, or was started in a folder other than the current one" in done.stderr
    assert {file: file.stat().st_mtime_ns for file in sweep.rglob("*")} == mine
