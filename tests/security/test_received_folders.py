"""A folder that someone else made is read, and runs nothing that it names, until its user says so."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.commands.ui import _require_places
from samewise.runner.errors import ConfigError
from samewise.runner.records import trust

TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "max_steps=2", "callbacks=none", "tracking=none", "evaluate.pictures=false")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run root with a run and a sweep of one point."""
    from samewise.runner.cli import main

    home = tmp_path_factory.mktemp("made")
    before = Path.cwd()
    os.chdir(home)
    try:
        assert main(["train", *TINY, "name=one"]) == 0
        assert main(["sweep", *TINY, "name=swept", "seed=0,1", "launcher.jobs=1"]) == 0
    finally:
        os.chdir(before)
    return home


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "home"
    shutil.copytree(made, copy, symlinks=True)
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def run(home: Path) -> Path:
    return next(home.glob("runs/one/*"))


@pytest.fixture
def sweep(home: Path) -> Path:
    return next(home.glob("runs/sweeps/*"))


@pytest.fixture
def picture(home: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (32, 32)).save(home / "picture.png")
    return home / "picture.png"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own package, with a data set that leaves a mark wherever it is told to."""
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
def test_a_received_run_makes_nothing_until_it_is_trusted_which_is_remembered(samewise, run, lab, picture, tmp_path, command) -> None:
    mark = tmp_path / "mark"
    received(run, mark)
    given = (command, run, *([picture] if command == "predict" else []), *(["--anyway"] if command == "verify" else []))
    done = samewise(*given)
    assert done.returncode == 2, done.stdout
    assert "was not made by you with this home folder, or was altered since" in done.stderr
    assert "--trust" in done.stderr
    assert not mark.exists()
    trusted = samewise(*given, "--trust")
    assert trusted.returncode == (1 if command == "verify" else 0)
    assert ("config.yaml is that of another experiment" in trusted.stdout) is (command == "verify")
    assert mark.exists() or command == "predict"  # which needs no data
    assert samewise(*given).returncode == trusted.returncode
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n")  # trusted as it was
    assert samewise(*given).returncode == 2


LINKS = ("metrics.jsonl", "trace.jsonl", "sender.log", ".lock", "artifacts")


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("is_there", [True, False], ids=["to a file", "to nothing"])
def test_training_writes_through_no_link_in_the_run_s_folder(samewise, run, tmp_path, name, is_there) -> None:
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")  # it begins anew, and would write each of them from the start
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    (run / name).unlink(missing_ok=True)
    mine = tmp_path / "mine"
    if is_there:
        mine.write_text("mine\nwithout an end")
    (run / name).symlink_to(mine)
    done = samewise("train", *TINY, "name=one")
    assert done.returncode == 2, done.stdout
    assert f"{name}: is damaged: it is a link, which may lead to any file of yours" in done.stderr
    assert mine.exists() == is_there
    assert not is_there or mine.read_text() == "mine\nwithout an end"


def test_pictures_and_reports_are_written_through_no_link(samewise, run, sweep, tmp_path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.write_text("mine")
    other.mkdir()
    pictures = run / "eval" / "valid-00000002"
    for made, target in (
        (pictures / "confusion_matrix.png", mine),
        (pictures, other),
        (run / "eval", other),
        (sweep / "report" / "index.html", mine),
        (sweep / "report", other),
    ):
        shutil.rmtree(made.parent, ignore_errors=True) if made.parent not in (run, sweep) else shutil.rmtree(made, ignore_errors=True)
        made.parent.mkdir(parents=True, exist_ok=True)
        made.symlink_to(target)
        of_run = run in made.parents
        done = samewise("eval", run) if of_run else samewise("report", sweep, "--no-mlflow")
        assert done.returncode == (0 if of_run else 2), done.stderr
        assert f"{made}: is damaged: it is a link" in done.stderr
        assert mine.read_text() == "mine"
        assert not [*other.rglob("*.*")]
        made.unlink()


@pytest.mark.parametrize("command", ["eval", "verify", "report", "sweep", "status", "cancel"])
def test_what_cannot_be_read_is_not_signed(samewise, run, sweep, command) -> None:
    of_run = command in ("eval", "verify")
    file = run / "config.yaml" if of_run else sweep / "sweep.json"
    file.write_text(file.read_text() + "\n[")
    file.with_name(trust.SIGNATURE).unlink()
    option = [f"--{command}"] if command in ("status", "cancel") else []
    done = samewise(command if command in ("eval", "verify", "report") else "sweep", file.parent, *option, "--trust")
    assert done.returncode == 2, done.stdout
    assert file.name in done.stderr
    assert not file.with_name(trust.SIGNATURE).exists()


def test_a_signature_of_a_stranger_s_is_none(samewise, run, tmp_path, monkeypatch) -> None:
    mine = os.environ["XDG_CONFIG_HOME"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "stranger"))
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "\n")
    assert trust.sign(run / "config.yaml")
    assert trust.is_signed(run / "config.yaml")
    monkeypatch.setenv("XDG_CONFIG_HOME", mine)
    assert not trust.is_signed(run / "config.yaml")
    assert samewise("eval", run).returncode == 2


def test_what_only_reads_needs_no_trust(samewise, run, sweep) -> None:
    (run / ".signature").unlink()
    (sweep / ".signature").unlink()
    for given in (("diff", run, run), ("digest", run), ("sweep", sweep, "--status"), ("sweep", "--status"), ("report", sweep, "--no-mlflow")):
        done = samewise(*given)
        assert done.returncode == 0, (given, done.stderr)


def test_a_copy_byte_for_byte_is_as_trusted_as_the_original(samewise, run, home) -> None:
    shutil.copytree(run, home / "copy", symlinks=True)
    assert samewise("digest", "copy").returncode == 0
    assert trust.is_signed(home / "copy" / "config.yaml")


def test_a_config_under_another_name_is_trusted_by_itself(samewise, run, home) -> None:
    """Two of them in one folder: each is named, and the trust in one does not end the trust in the other."""
    for name in ("mine.yaml", "other.yaml"):
        shutil.copyfile(run / "config.yaml", home / name)
        refused = samewise("train", "--config", name)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"error: {name}: was not made by you")
        assert samewise("train", "--config", name, "--trust").returncode == 0
    for name in ("mine.yaml", "other.yaml"):
        assert samewise("train", "--config", name).returncode == 0


def test_a_received_config_trains_below_runs_and_not_where_its_run_was(samewise, run, home, tmp_path, monkeypatch) -> None:
    theirs = tmp_path / "theirs"
    assert samewise("train", "--config", run / "config.yaml", f"run_root={theirs}", "max_steps=1", "--trust").returncode == 0
    (file,) = theirs.glob("*/*/config.yaml")
    before = sorted(theirs.rglob("*"))
    shutil.copytree(file.parent, home / "received", symlinks=True)
    done = samewise("train", "--config", home / "received" / "config.yaml", "seed=7")
    assert done.returncode == 0, done.stderr
    assert f"run_root={theirs} keeps it there" in done.stderr
    assert sorted(theirs.rglob("*")) == before
    assert len(list(home.glob("runs/one/*"))) == 2


def test_of_an_archive_it_is_said_what_it_is_and_not_how_to_run_what_is_in_it(samewise, run, home) -> None:
    import tarfile

    with tarfile.open(home / "result.bundle", "w") as archive:
        archive.add(run / "config.yaml", "run/config.yaml")
    for command in ("digest", "eval", "diff"):
        done = samewise(command, "result.bundle", *([run] if command == "diff" else []))
        assert done.returncode == 2
        assert "tar -xf" in done.stderr
        assert "weights_only" not in done.stderr
    assert "is not an override; hint: give one run at a time" in samewise("eval", run, run).stderr


def test_a_sweep_is_continued_where_it_was_begun_and_not_from_a_copy(samewise, home, sweep) -> None:
    shutil.copytree(sweep, home / "copy")
    mine = {file: file.stat().st_mtime_ns for file in sweep.rglob("*")}
    for given in (("sweep", "copy"), ("sweep", "copy", "--retry-failed"), ("sweep", "copy", "--list")):
        done = samewise(*given)
        assert done.returncode == 2, done.stdout
        assert "copy: is a copy, or was begun in another folder" in done.stderr
    assert {file: file.stat().st_mtime_ns for file in sweep.rglob("*")} == mine


def test_a_file_that_is_missing_or_cannot_be_read_is_named(samewise, run, sweep) -> None:
    config = run / "config.yaml"
    lines = config.read_text().splitlines()
    config.write_text("\n".join([*lines[:4], "a: [", *lines[4:]]))
    told = samewise("eval", run, "--trust").stderr
    assert f"{config}: is not a run's config: line " in told
    config.unlink()
    for name in (run, f"one/{run.name}"):
        assert f"{run.name}: the folder is there, but there is no config.yaml in it" in samewise("eval", name).stderr
    (sweep / "points.jsonl").write_text("")
    for given in (("sweep", sweep, "--status"), ("report", sweep)):
        done = samewise(*given)
        assert done.returncode == 2
        assert "points.jsonl: the line of point 0 is damaged or missing" in done.stderr
    (sweep / "sweep.json").unlink()
    assert "there is no sweep.json in it" in samewise("sweep", sweep, "--status").stderr


def test_the_ui_shows_files_outside_of_the_stores_folder_only_where_they_are_trusted(tmp_path) -> None:
    file = tmp_path / "mlflow.db"
    uri = f"sqlite:///{file}"

    def add(location: str, *runs: str) -> None:
        with contextlib.closing(sqlite3.connect(file)) as store:
            store.executescript("CREATE TABLE IF NOT EXISTS experiments (artifact_location); CREATE TABLE IF NOT EXISTS runs (artifact_uri)")
            store.execute("INSERT INTO experiments VALUES (?)", (location,))
            store.executemany("INSERT INTO runs VALUES (?)", [(run,) for run in runs])
            store.commit()

    def refused() -> str:
        with pytest.raises(ConfigError) as told:
            _require_places(uri, trust=False)
        return str(told.value)

    add(str(tmp_path / "mlartifacts" / "1"), f"{tmp_path}/mlartifacts/1/a/artifacts", "mlflow-artifacts:/1")
    _require_places(uri, trust=False)
    add("s3://mine/1", "s3://mine/1/a/artifacts")
    assert ": s3://mine/1; hint: if these places are yours" in refused()
    _require_places(uri, trust=True)
    add("s3://mine/1", "s3://mine/1/b/artifacts")  # another run in the same place
    _require_places(uri, trust=False)
    add("file:///home/me/%2Essh", f"{tmp_path}/mlartifacts/../../secret")
    assert "mlflow.db: the store has MLflow show files outside of its folder" in refused()
    for place in ("/home/me/.ssh", str(tmp_path.parent / "secret"), "s3://mine/1", "--trust"):
        assert place in refused()
    file.with_name(".mlflow.db.places").write_text(f"/home/me/.ssh\n{tmp_path.parent}/secret\ns3://mine/1\n")  # a stranger's own list
    assert "/home/me/.ssh" in refused()
    with contextlib.closing(sqlite3.connect(file)) as store:  # where a logged model's files are
        store.executescript("CREATE TABLE logged_models (artifact_location)")
        store.executemany("INSERT INTO logged_models VALUES (?)", [("s3://mine/1/models/m-1",), ("/etc/ssl/private",)])
        store.commit()
    assert "/etc/ssl/private" in refused()
    assert "m-1" not in refused()


def test_the_command_ui_starts_no_server_over_a_store_that_shows_other_folders(samewise, tmp_path, monkeypatch) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        store.executescript("CREATE TABLE experiments (artifact_location); CREATE TABLE runs (artifact_uri); INSERT INTO experiments VALUES ('/etc')")
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **named: started.append(given))
    done = samewise("ui", "--run-root", tmp_path)
    assert done.returncode == 2
    assert "/etc" in done.stderr
    assert "--trust" in done.stderr
    assert not started


def test_a_run_of_an_older_version_is_answered_for_and_trained_on_without_trust(samewise, run) -> None:
    """`train` composes what it runs from the user's own command line."""
    (run / ".signature").unlink()
    assert samewise("train", *TINY, "name=one").returncode == 0
    (run / "summary.json").unlink()
    assert samewise("train", *TINY, "name=one").returncode == 0
    assert samewise("eval", run).returncode == 0  # written by this user now


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SLURM's commands, as ones that leave a mark."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol"):
        (folder / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/mark\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "mark"


def on_a_cluster(sweep: Path, **changes: Any) -> None:
    """The sweep as a stranger hands it on, with jobs that SLURM would be asked for."""
    file = sweep / "sweep.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "launcher": {"_target_": "samewise.runner.launchers.slurm.Slurm"}, **changes}))
    (sweep / "slurm").mkdir()
    (sweep / "slurm" / "0001.json").write_text(json.dumps({"points": [0, 1], "job": "1", "variables": [{}, {}]}))


def test_a_received_sweep_is_shown_and_its_launcher_runs_no_command_until_it_is_trusted(samewise, sweep, cluster) -> None:
    on_a_cluster(sweep)
    for given in (("sweep", sweep, "--status"), ("report", sweep)):
        done = samewise(*given)
        assert done.returncode == 0, done.stderr
        assert "its launcher is not asked" in done.stderr
    for given in (("sweep", sweep, "--cancel"), ("sweep", sweep), ("sweep", sweep, "--list"), ("sweep", *TINY, "name=swept", "seed=0,1", "launcher.jobs=1")):
        done = samewise(*given)
        assert done.returncode == 2, done.stdout
        assert "--trust" in done.stderr
    assert not cluster.exists()
    samewise("sweep", sweep, "--status", "--trust")
    assert cluster.exists()


def test_a_sweep_s_folder_does_not_say_whose_packages_a_launcher_is_from(samewise, sweep, tmp_path, monkeypatch) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "strange_lab.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nfrom samewise.runner.launchers.local import Local\nclass Mine(Local):\n    detached = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    on_a_cluster(sweep, launcher={"_target_": "strange_lab.Mine"}, packages=["strange_lab"], root=str(tmp_path))
    done = samewise("sweep", sweep, "--status", "--trust")
    assert done.returncode == 2, done.stdout
    assert "outside the packages" in done.stderr
    assert not mark.exists()


def test_a_job_trains_under_another_home_than_that_of_the_sweep(sweep, tmp_path, monkeypatch) -> None:
    """As in a pod, or on a machine whose home is not shared."""
    from samewise.runner.launchers.job import main

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    for run in sweep.parents[1].glob("swept/*"):
        shutil.rmtree(run)
    for _ in range(2):  # and again, as after a preemption, where another pod has another key
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        assert main(sweep, 0) == 0
        for summary in sweep.parents[1].glob("swept/*/summary.json"):
            summary.unlink()


def test_processes_that_make_the_key_at_once_have_one_key_that_only_the_user_can_read(tmp_path, clean_environment) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    code = (
        "import sys; sys.stdin.read(1); from pathlib import Path; from samewise.runner.records import trust; print(trust._key()); "
        f"assert trust.sign(Path({str(tmp_path / 'config.yaml')!r}))"
    )
    environment = {**clean_environment, "XDG_CONFIG_HOME": str(tmp_path / "home"), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    for one in started:
        assert one.stdin is not None
        one.stdin.write("x")
        one.stdin.flush()
    keys = {one.communicate(timeout=60)[0].strip() for one in started}
    assert len(keys) == 1
    assert len(keys.pop()) == 64
    assert all(one.returncode == 0 for one in started)
    key = tmp_path / "home" / "samewise" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert [one.name for one in key.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("spoilt", ["no folder can be made", "a key that is none"])
def test_a_home_that_cannot_be_written_leaves_folders_unsigned_and_is_no_error(samewise, home, tmp_path, monkeypatch, spoilt) -> None:
    config = tmp_path / "config"
    if spoilt == "no folder can be made":
        config.write_text("a file, in the place of the folder")
    else:
        (config / "samewise").mkdir(parents=True)
        (config / "samewise" / "key").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    assert samewise("train", *TINY, "name=other").returncode == 0
    run = next(home.glob("runs/other/*"))
    assert not (run / ".signature").exists()
    assert samewise("eval", run).returncode == 2
    assert samewise("eval", run, "--trust").returncode == 0
    assert samewise("eval", run).returncode == 2


def test_a_user_without_a_home_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(cls: Callable[..., Any] = Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", none)
    (tmp_path / "config.yaml").write_text("a: 1\n")
    assert not trust.sign(tmp_path / "config.yaml")
    assert not trust.is_signed(tmp_path / "config.yaml")
