"""A run of an older samewise counts if the experiment differs from it only in new settings that have their defaults."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import QUIET

from samewise import __version__ as samewise_version
from samewise.runner.config import earlier_version

TINY = [*QUIET, "model=resnet20_cifar", "model.width=2", "dataset=digits", "transforms=images", "max_steps=2", "checkpoint.every_steps=1", "name=older"]


@pytest.fixture
def older(samewise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a samewise in which the model had no argument `shortcut`."""
    monkeypatch.chdir(tmp_path)
    done = samewise("train", *TINY, "~model.shortcut")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs" / "older").iterdir()
    record = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**record, "versions": {**record["versions"], "samewise": "0.0.9"}}))
    earlier_version._runs_of_other_versions.cache_clear()
    earlier_version._note.cache_clear()
    return folder


def runs(older: Path) -> list[str]:
    return sorted(path.name for path in older.parent.iterdir())


def test_a_finished_run_counts_and_an_interrupted_one_is_resumed(samewise: Callable[..., Any], older: Path) -> None:
    done = samewise("train", *TINY)
    assert "already finished" in done.stdout
    assert 'note: samewise 0.0.9 trained older without model.shortcut="A", which is new since then' in done.stderr
    before = json.loads((older / "summary.json").read_text())["weights_sha256"]
    (older / "summary.json").unlink()
    (older / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    assert samewise("train", *TINY).returncode == 0
    assert json.loads((older / "summary.json").read_text())["weights_sha256"] == before
    assert runs(older) == [older.name]


def test_show_and_check_name_the_run_that_train_would_use(samewise: Callable[..., Any], older: Path) -> None:
    for command in (["show", "--json"], ["check", "--static", "--json"]):
        told = json.loads(samewise(*command, *TINY).stdout)
        assert told["fingerprint"].startswith(older.name)


def test_a_sweep_warns_of_changed_code_of_samewise_in_finished_runs(samewise: Callable[..., Any], older: Path) -> None:
    record = json.loads((older / "environment.json").read_text())
    label = next(iter(record["code"]))
    (older / "environment.json").write_text(json.dumps({**record, "code": {**record["code"], label: "0" * 16}, "code_state": ""}))
    done = samewise("sweep", *TINY, "seed=0")
    assert done.returncode == 0, done.stderr
    words = f"samewise's own code has changed (version 0.0.9, now {samewise_version}): {label}; finished runs were trained with another version"
    assert done.stderr.count(words) == 1, done.stderr


def test_defaults_are_found_where_they_are_defined() -> None:
    def default(target: str, argument: str) -> list[Any]:
        return [ast.literal_eval(node) for node in earlier_version._defaults(target, argument)][:1]

    assert default("samewise.recipes.models.resnet.resnet_cifar", "depth") == [20]
    assert default("samewise.runner.optim.schedules.OneCycle", "pct_start") == [0.3]
    assert default("samewise.datasets.digits.Digits", "nothing") == []
    assert default("torch.optim.SGD", "lr") == []
