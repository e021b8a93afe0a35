"""Messages that a person can act on: about the folder of runs, the tracking address, files, and metrics that are not numbers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
from samewise_tiny import DIGITS
from torch import nn

from samewise.runner.errors import ConfigError, describe
from samewise.runner.optim.weights import load_weights

TINY = (*DIGITS, "max_steps=1")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("run_root=", "run_root: is not a folder name"),
        ("run_root=~/x", "run_root: begins with ~"),
        ("run_root='~/x'", "run_root: begins with ~"),
        ("tracking.uri=htp://x", "tracking.uri: 'htp' is not a tracking address"),
    ],
)
def test_an_invalid_run_root_or_tracking_address_is_named(given: str, told: str, samewise: Callable[..., Any]) -> None:
    done = samewise("check", "experiment=resnet18_digits", "--static", given)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE, errno.ENAMETOOLONG])
def test_a_disk_error_is_reported_with_its_file(number: int) -> None:
    code, said = describe(OSError(number, os.strerror(number), "runs/one/metrics.jsonl"))
    assert code == 1
    assert said.startswith(f"error: runs/one/metrics.jsonl: {os.strerror(number)}; hint: check the storage and the permissions")


def test_doctor_reports_a_run_root_that_is_not_writable(samewise: Callable[..., Any]) -> None:
    told = samewise("doctor", "--run-root", "/proc/x").stdout
    (line,) = (line for line in told.splitlines() if line.split()[1:2] == ["run_root"])
    assert line.startswith("bad")
    assert "not writable: " in line


def test_a_pipe_in_place_of_weights_is_reported_and_does_not_block(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match="is a pipe or a device, not a file of weights"):
        load_weights(nn.Linear(1, 1), str(tmp_path / "weights.safetensors"), strict=True)
