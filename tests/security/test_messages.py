"""Messages that a person can act on: about the folder of runs, the tracking address, files, and metrics that are not numbers."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from samewise_tiny import DIGITS
from torch import nn

from samewise.runner.config.instantiate import locate
from samewise.runner.errors import ConfigError, describe
from samewise.runner.optim.weights import load_weights
from samewise.runner.records import tested

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


TARGETS = {
    "torch.hub.load": ["downloads a repository and runs its code", "--package NAME", "initialise.weights=FILE"],
    "torch.load": ["weights are read by initialise.weights=FILE"],
    "timm.create_model": ['--package timm, or packages = ["timm"] under [tool.samewise] in pyproject.toml'],
    "os.system": ["in Python's standard library"],
    "torch.nn.parallel.DistributedDataParallel": [
        "is in torch.nn.parallel, which a config may not name: it wraps a model for several devices: `strategy` does"
    ],
    "torch.nn.DataParallel": ["is in torch.nn.parallel, which a config may not name"],
    "torchvision.models.feature_extraction.create_feature_extractor": ["generates and compiles source code"],
    "torch.nn.Lineer": ["did you mean 'Linear'?"],
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_forbidden_target_is_reported_with_what_to_do_instead(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        locate(target, "model", ())
    (problem,) = caught.value.problems
    assert all(words in str(problem) for words in TARGETS[target]), problem
    assert f"'{target}'?" not in str(problem)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE, errno.ENAMETOOLONG])
def test_a_disk_error_is_reported_with_its_file(number: int) -> None:
    code, said = describe(OSError(number, os.strerror(number), "runs/one/metrics.jsonl"))
    assert code == 1
    assert said.startswith(f"error: runs/one/metrics.jsonl: {os.strerror(number)}; hint: check the storage and the permissions")


def test_a_text_file_is_refused_as_weights() -> None:
    with pytest.raises(ConfigError, match=r"initialise\.weights: is not a file of weights"):
        load_weights(nn.Linear(1, 1), "/etc/passwd", strict=True)


def test_doctor_reports_a_run_root_that_is_not_writable(samewise: Callable[..., Any]) -> None:
    told = samewise("doctor", "--run-root", "/proc/x").stdout
    (line,) = (line for line in told.splitlines() if line.split()[1:2] == ["run_root"])
    assert line.startswith("bad")
    assert "not writable: " in line


def test_doctor_names_a_package_that_is_newer_than_tested(samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tested.NEWEST, "omegaconf", "2.2")
    findings = json.loads(samewise("doctor", "--json").stdout)
    newer = {one["what"]: one for one in findings if "newer than tested" in one["found"]}
    assert newer["omegaconf"]["state"] == "remark"
    assert newer["omegaconf"]["advice"] == "samewise was tested with omegaconf up to 2.2"
    assert "torch" not in newer


def test_a_pipe_in_place_of_weights_is_reported_and_does_not_block(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match="is a pipe or a device, not a file of weights"):
        load_weights(nn.Linear(1, 1), str(tmp_path / "weights.safetensors"), strict=True)
