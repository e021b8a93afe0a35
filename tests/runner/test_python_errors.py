"""What `samewise.compose`, `train`, `load`, `runs` and `sweep` say of wrong arguments: in a line, in the words of Python, not of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import samewise as sw
from samewise.runner.errors import ConfigError

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a folder that is not there": (lambda: sw.runs("nothere"), "run_root: there is no such folder"),
    "a run elsewhere": (lambda: sw.load("3f2a", run_root="nothere"), "others' are found by run_root=FOLDER"),
    "a condition": (lambda: sw.runs(".", where="x"), "where: cannot be read"),
    "a package": (lambda: sw.compose("model._target_=labs.Net", packages="labs"), "packages: this package cannot be found"),
    "a folder of configs": (lambda: sw.compose(config_dirs="nothere"), "correct `configs` or config_dirs"),
    "a list of overrides": (lambda: sw.compose(["model=resnet18"]), "samewise.compose(*overrides)"),  # pyright: ignore[reportArgumentType]
    "a list of a sweep's": (lambda: sw.sweep(["seed=1,2"]), "samewise.sweep(*overrides)"),  # pyright: ignore[reportArgumentType]
    "a number": (lambda: sw.compose("experiment=resnet18_digits", 5), "samewise.compose('experiment=NAME', "),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_the_first_line_is_in_the_words_of_python(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, words = MISTAKES[kind]
    with pytest.raises(ConfigError) as caught:
        wrong()
    first = str(caught.value).splitlines()[0]
    assert words in first
    assert "--" not in first


def test_options_are_named_as_arguments_and_commands_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r'if you trust its code as your own: packages=\["labs"\]'):
        sw.train("model._target_=labs.Net")
    (tmp_path / "mine" / "a").mkdir(parents=True)
    (tmp_path / "mine" / "a" / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"`samewise runs --run-root .*`"):
        sw.load(tmp_path / "mine", run_root=".")


def test_a_notebook_shows_the_error_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()
    shell.run_cell("import samewise\nsamewise.compose('experiment=resnet18_digits', 'lr=1')")
    told = capsys.readouterr()
    assert (told.out + told.err).strip().splitlines() == ["error: lr: no such key; hint: did you mean 'optimizer.lr'?", "    value:    1"]
    shell.run_cell("%tb")
    InteractiveShell.clear_instance()


def test_their_signatures_are_still_told() -> None:
    assert list(inspect.signature(sw.runs).parameters) == ["run_root", "where", "sort", "diff", "uri"]
