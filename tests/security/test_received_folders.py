"""A folder made by someone else can be read, but nothing that it names runs until the user allows it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

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
    done = samewise(*given)
    assert done.returncode == 2, done.stdout
    assert "is not signed by you: someone else made it, it was altered" in done.stderr
    assert "--trust" in done.stderr
    assert not mark.exists()
    trusted = samewise(*given, "--trust")
    assert trusted.returncode == (1 if command == "verify" else 0)
    assert ("config.yaml is that of another experiment" in trusted.stdout) is (command == "verify")
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
    assert done.returncode == (1 if command == "verify" else 0)
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
        done = samewise(*given)
        assert done.returncode == 0, (given, done.stderr)


def test_each_config_in_a_folder_is_trusted_separately(samewise, run, home) -> None:
    """Two configs in one folder: each is named, and trusting one does not end the trust in the other."""
    for name in ("mine.yaml", "other.yaml"):
        shutil.copyfile(run / "config.yaml", home / name)
        refused = samewise("train", "--config", name)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"error: {name}: is not signed by you")
        assert samewise("train", "--config", name, "--trust").returncode == 0
    for name in ("mine.yaml", "other.yaml"):
        assert samewise("train", "--config", name).returncode == 0


def test_train_continues_an_unsigned_run_without_trust_and_signs_it(samewise, run) -> None:
    """`train` composes what it runs from the user's own command line."""
    (run / ".signature").unlink()
    assert samewise("train", *TINY, "name=one").returncode == 0
    (run / "summary.json").unlink()
    assert samewise("train", *TINY, "name=one").returncode == 0
    assert samewise("eval", run).returncode == 0  # written by this user now


def test_concurrent_processes_create_one_key_that_only_the_user_can_read(tmp_path, clean_environment) -> None:
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
