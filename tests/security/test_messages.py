"""What a person can act on: the folder of runs, the address of tracking, and metrics that are no numbers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from samewise.recipes.classification import ClassificationScores
from samewise.runner.errors import ConfigError, describe
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


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE, errno.ENAMETOOLONG])
def test_what_a_failing_disk_refuses_is_told_with_its_file(number: int) -> None:
    code, said = describe(OSError(number, os.strerror(number), "runs/one/metrics.jsonl"))
    assert code == 1
    assert said.startswith(f"error: runs/one/metrics.jsonl: {os.strerror(number)}; hint: check the storage and the permissions")


def test_a_share_of_a_disk_that_is_used_up_is_a_full_disk() -> None:
    assert "the disk is full at x; hint: free some space" in describe(OSError(errno.EDQUOT, "Disk quota exceeded", "x"))[1]


def test_a_run_root_that_is_too_long_is_told_of(samewise: Callable[..., Any]) -> None:
    done = samewise("train", *TINY, f"run_root={'x/' * 3000}")
    assert done.returncode == 1
    assert "File name too long; hint: " in done.stderr


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
