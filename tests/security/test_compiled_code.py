"""Compiled code is loaded and run from a folder of the user's own, not from one in /tmp whose name another user can take first."""

import getpass
import os
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
