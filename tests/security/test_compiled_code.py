"""Compiled code is loaded and run from a folder of the user's own, not from one in /tmp whose name another user can take first."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from samewise.runner.processes import variables
from samewise.runner.processes.variables import CACHE, use_own_inductor_cache

TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "max_steps=2", "callbacks=none", "tracking=none", "evaluate.pictures=false")


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns the folder in which compiled code is kept, given a value of the environment variable."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(variables.atexit, "register", lambda *given: None)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def choose(given: str | None) -> Path:
        monkeypatch.setenv(CACHE, given) if given else monkeypatch.delenv(CACHE, raising=False)
        use_own_inductor_cache()
        return Path(os.environ[CACHE])

    return choose


def test_code_is_kept_in_the_users_own_cache_or_where_the_user_says(chosen, tmp_path) -> None:
    own = tmp_path / "home" / ".cache" / "samewise" / "inductor"
    assert chosen(None) == own
    assert own.stat().st_mode & 0o777 == 0o700
    assert chosen(str(tmp_path / "mine")) == tmp_path / "mine"
    assert chosen(f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}") == own  # torch's own choice, made as it was imported


@pytest.mark.parametrize("why", ["others can write there", "it is a file", "no home"])
def test_a_cache_that_is_not_private_to_the_user_is_not_used(chosen, tmp_path, monkeypatch, why) -> None:
    own = tmp_path / "home" / ".cache" / "samewise" / "inductor"
    own.parent.mkdir(parents=True)
    match why:
        case "others can write there":
            own.mkdir()
            own.chmod(0o777)
        case "it is a file":
            own.write_text("")
        case _:
            monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    found = chosen(None)
    assert found.parent == Path(tempfile.gettempdir())
    assert re.match("samewise-inductor-.{8}", found.name)
    assert found.stat().st_mode & 0o777 == 0o700
    assert chosen(str(found)) == found  # in a process that this one starts


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", ["train", "export"])
def test_nothing_is_written_to_a_folder_that_another_user_made_in_tmp(clean_environment, made, tmp_path, command) -> None:
    """The folder that torch itself would choose exists already, and everybody may write to it."""
    temporary = tmp_path / "tmp"
    planted = temporary / f"torchinductor_{getpass.getuser()}"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    run = next(made.glob("runs/one/*"))
    environment = {name: value for name, value in clean_environment.items() if name != CACHE}
    environment |= {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def samewise(*arguments: object) -> str:
        given = [sys.executable, "-m", "samewise", *map(str, arguments)]
        done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    if command == "train":
        samewise("train", *TINY, "compile=default")
    else:
        samewise("export", run, "--out", "exported", "--to", "aoti")
        assert "aoti" in samewise("verify", "exported")
    assert not list(planted.iterdir())
    kept = [path.suffix for path in (tmp_path / "cache" / "samewise" / "inductor").rglob("*")]
    assert {".cpp", ".gch"} <= {*kept}
