"""What a person can act on: the folder of runs, the address of tracking, and metrics that are no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from samewise.recipes.classification import ClassificationScores
from samewise.runner.errors import ConfigError
from samewise.runner.optim.weights import load_weights

TINY = ("experiment=resnet18_digits", "debug=tiny", "max_steps=1", "callbacks=none", "tracking=none", "evaluate.pictures=false")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("run_root=", "run_root: names no folder"),
        ("run_root=~/x", "run_root: begins with ~"),
        ("run_root='~/x'", "run_root: begins with ~"),
        ("tracking.uri=htp://x", "tracking.uri: 'htp' is not a tracking address"),
    ],
)
def test_a_place_that_cannot_be_is_named(given: str, told: str, samewise: Callable[..., Any]) -> None:
    done = samewise("check", "experiment=resnet18_digits", "--static", given)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_file_of_text_is_no_file_of_weights() -> None:
    with pytest.raises(ConfigError, match=r"initialise\.weights: is not a file of weights"):
        load_weights(nn.Linear(1, 1), "/etc/passwd", strict=True)


def test_doctor_tries_to_write(samewise: Callable[..., Any]) -> None:
    told = samewise("doctor", "--run-root", "/proc/x").stdout
    (line,) = (line for line in told.splitlines() if line.split()[1:2] == ["run_root"])
    assert line.startswith("bad")
    assert "not writable: " in line


def test_a_metric_that_is_text_is_named(samewise: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClassificationScores, "compute", lambda self: {"loss": 0.1, "accuracy": "high"})
    done = samewise("train", *TINY, f"run_root={tmp_path}")
    assert done.returncode == 2
    assert "valid/accuracy: this metric is not a number" in done.stderr
    assert "'high'" in done.stderr
