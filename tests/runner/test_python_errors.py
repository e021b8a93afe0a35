"""What the functions of `samewise` report about wrong arguments: one line that names Python arguments, not options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import samewise as sw
from samewise.runner.errors import ConfigError

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a folder that is not there": (lambda: sw.runs("nothere"), "run_root: the folder does not exist"),
    "a run elsewhere": (lambda: sw.load("3f2a", run_root="nothere"), "if it is not in nothere, give the path of its folder"),
    "a condition": (lambda: sw.runs(".", where="x"), "where: is not a valid condition"),
    "a package": (lambda: sw.compose("model._target_=labs.Net", packages="labs"), "packages: this package cannot be found"),
    "a folder of configs": (lambda: sw.compose(config_dirs="nothere"), "correct `configs` or config_dirs"),
    "a list of overrides": (lambda: sw.compose(["model=resnet18"]), "samewise.compose(*overrides)"),  # pyright: ignore[reportArgumentType]
    "a folder for a new sweep": (lambda: sw.sweep("seed=1,2", run_root="x"), "run_root: is where a sweep is looked up by its id"),
    "a number": (lambda: sw.compose("experiment=resnet18_digits", 5), "samewise.compose('experiment=NAME', "),  # pyright: ignore[reportArgumentType]
    "an override's name": (lambda: sw.train(experiment="x"), "overrides are strings: samewise.train('experiment=x')"),  # pyright: ignore
    "an override of a run": (lambda: sw.predict("a", "a.png", device="cpu"), "overrides are strings: samewise.load(run, 'device=cpu')"),
    "a list of a run's": (lambda: sw.load("a", ["device=cpu"]), "samewise.load(run, *overrides)"),  # pyright: ignore[reportArgumentType]
    "an argument misspelt": (lambda: sw.runs(sorted="x"), "sorted: samewise.runs has no such argument; hint: did you mean 'sort'?"),  # pyright: ignore
    "a word for a switch": (lambda: sw.sweep("seed=1,2", wait="no"), "wait: is not a switch; expected: True or False"),  # pyright: ignore
    "a run by a wrong name": (lambda: sw.load("nothing"), "run: no such run in the folder runs"),
    "no files": (lambda: sw.predict("a"), "files: no files to predict from were given"),
    "an array for a file": (lambda: sw.predict("a", np.zeros((3, 8, 8))), "files: is not the name of a file; hint: "),  # pyright: ignore
    "a text for a score": (lambda: sw.predict("a", "a.png", threshold="0.5"), "threshold: is not a valid score; expected: a number from 0 to 1"),  # pyright: ignore
    "a text for steps": (lambda: sw.verify("a", steps="2"), "steps: is not a number of steps; expected: a whole number from 1"),  # pyright: ignore
    "a format": (lambda: sw.export("a", "b", to="onx"), "to: is not a format that models are exported to; hint: did you mean 'onnx'?"),
    "a run to compare": (lambda: sw.diff(5, "a"), "run: is not a run; expected: what samewise.train returned"),  # pyright: ignore
    "a checkpoint that is none": (lambda: sw.load("a", checkpoint=0.5), "checkpoint: is not a checkpoint; expected: 'best', 'last' or a step"),  # pyright: ignore
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_the_first_line_names_python_arguments_not_options(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, words = MISTAKES[kind]
    with pytest.raises(ConfigError) as caught:
        wrong()
    first = str(caught.value).splitlines()[0]
    assert words in first
    assert "--" not in first


def test_a_notebook_shows_the_error_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()
    shell.run_cell("import samewise\nsamewise.compose('experiment=resnet18_digits', 'lr=1')")
    told = capsys.readouterr()
    assert (told.out + told.err).strip().splitlines() == ["error: lr: no such key; hint: did you mean 'optimizer.lr'?", "    value:    1"]
    shell.run_cell("%tb")
    InteractiveShell.clear_instance()
