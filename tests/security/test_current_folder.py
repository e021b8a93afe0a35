"""Nothing is imported from the folder that a command runs in, and a config file changes none of Hydra's settings."""

import getpass
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from samewise_tiny import DIGITS

from samewise.runner.config import project
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.processes import variables
from samewise.runner.processes.variables import CACHE, use_own_inductor_cache
from samewise.runner.records.environment import git_state

TINY = [*DIGITS, "max_steps=1"]
MARKS = "import pathlib\npathlib.Path(__file__).with_name('mark').write_text(__name__)\n"
ABSENT = ("cuda", "winreg")
"""Missing modules that libraries try to import: they are found wherever the folder stands on sys.path."""
STANDARD = ("argparse", "logging", "queue", "socket", "yaml", "struct", "json", "selectors", "random")


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "samewise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=250, check=False)


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A folder with files named like modules, and with a plugin for Hydra; each leaves a mark when it is imported."""
    for name in (*STANDARD, *ABSENT):
        (tmp_path / f"{name}.py").write_text(MARKS)
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "stranger.py").write_text(MARKS)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("is_project", [pytest.param(False, marks=pytest.mark.long), True], ids=["a folder", "a project with packages"])
def test_ranks_import_nothing_from_the_current_folder(strange: Path, is_project: bool) -> None:
    if is_project:
        (strange / "pyproject.toml").write_text('[tool.samewise]\npackages = ["samewise"]\n')
    done = run("train", *TINY, "model.width=4", "strategy=elastic", "replicas=2", "strategy.nproc=2", f"run_root={strange / 'runs'}", folder=strange)
    assert done.returncode == 0, done.stderr + done.stdout
    marks = {path.read_text() for path in strange.glob("mark")}
    assert marks <= set(ABSENT) if is_project else not marks  # a project's own folder comes last on the path; its marks show that the test could fail
    assert marks or not is_project


def test_another_users_project_file_above_the_current_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["json"]\n')
    (tmp_path / "below").mkdir()
    os.chown(tmp_path / "pyproject.toml", 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 12345\)"):
        project.find(tmp_path / "below")
    assert project.find(tmp_path).packages == ("json",)
    tmp_path.chmod(0o1777)  # like /tmp, where anybody could have left it
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 12345\).*copy it into a folder of your own"):
        project.find(tmp_path)
    os.chown(tmp_path / "pyproject.toml", 0, 0)
    assert project.find(tmp_path / "below").packages == ("json",)


@pytest.mark.parametrize("settings", ["job: {env_set: {PATH: /tmp}}", "run: {dir: /tmp}", "sweeper: {_target_: os.system}"])
def test_a_config_file_that_sets_hydra_options_is_refused(settings: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\ndefaults:\n  - /experiment/resnet18_digits\nhydra:\n  {settings}\n"
    (tmp_path / "experiment" / "strange.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"strange\.yaml:4: hydra: no such key"):
        compose(["experiment=strange"], project=Project(tmp_path, configs=(tmp_path,)))


def git(folder: Path, *arguments: str) -> None:
    quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_ALLOW_PROTOCOL": "file"}
    subprocess.run(["git", "-c", "user.email=a@b", "-c", "user.name=a", *arguments], cwd=folder, env={**os.environ, **quiet}, check=True, capture_output=True)


RUNS = {
    "a monitor": ["core.fsmonitor {}"],
    "a filter": ["filter.x.clean {}; cat"],
    "a required filter": ["filter.x.clean {}; cat", "filter.x.required true"],
    "a filter that stays": ["filter.x.process {}"],
    "a filter with a sign in its name": ["filter.a=b.clean {}; cat"],
    "a program for differences": ["diff.external {} #"],
    "a program for differences of a kind": ["diff.x.command {} #", "diff.x.textconv {}; cat"],
    "a hook": ["core.hooksPath hooks"],
}


@pytest.mark.parametrize("kind", RUNS)
def test_recording_the_state_of_a_received_checkout_runs_nothing(kind: str, tmp_path: Path) -> None:
    here, mark = tmp_path / "checkout", tmp_path / "mark"
    here.mkdir()
    git(here, "init", "-q")
    (here / "a.txt").write_text("a\n")
    (here / ".gitattributes").write_text("*.txt filter=a=b diff=x\n" if "sign" in kind else "*.txt filter=x diff=x\n")
    (here / "hooks").mkdir()
    hook = here / "hooks" / "post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    git(here, "add", ".")
    git(here, "commit", "-q", "-m", "x")
    hook.chmod(0o755)
    (here / "a.txt").write_text("b\n")
    for line in RUNS[kind]:
        key, _, value = line.partition(" ")
        git(here, "config", key, value.format(f"touch {mark}"))
    os.utime(here / ".gitattributes")  # so that git would look at it again and write its index
    state = git_state(here)
    assert not mark.exists()
    assert "sign" in kind or (state["dirty"] and "+b" in state["diff"])
    for control in (("diff", "HEAD"), ("status",)):
        subprocess.run(["git", *control], cwd=here, capture_output=True, check=False)
    assert mark.exists()  # otherwise the test could not fail


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
