"""A setting that was renamed is taken by its old name for a while, with a warning, and changes no fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.config import compose, deprecated
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError

OLD = {"evaluate.samples": "evaluate.limit", "model.planes": "model.width", "optimizer.speed": "set optimizer.lr instead"}


@pytest.fixture(autouse=True)
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecated, "DEPRECATED", OLD)
    deprecated._warn.cache_clear()


def experiment(folder: Path, *overrides: str) -> compose.Composed:
    return compose.compose(["model=resnet20_cifar", "dataset=digits", *overrides], project=Project(folder, configs=(folder,) if list(folder.iterdir()) else ()))


def test_config_files_get_the_new_name_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "thin.yaml").write_text("defaults: [resnet20_cifar]\nplanes: 4\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults: [{override /model: thin}]\nevaluate: {samples: 2}\n")
    composed = experiment(tmp_path, "experiment=mine", "model=thin")
    assert (composed.cfg.evaluate.limit, composed.cfg.model.width) == (2, 4)
    said = capsys.readouterr().err
    assert f"{tmp_path}/model/thin.yaml: model.planes is now called model.width" in said
    assert f"{tmp_path}/experiment/mine.yaml: evaluate.samples is now called evaluate.limit" in said


def test_a_run_by_the_old_name_keeps_its_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = experiment(tmp_path, "evaluate.limit=2", "model.width=8")
    text = compose.dump(now).replace("width: 8", "planes: 8").replace("limit: 2", "samples: 2")
    whole: dict[str, Any] = json.loads(json.dumps(now.whole))
    for group, (old, new) in {"evaluate": ("samples", "limit"), "model": ("planes", "width")}.items():
        whole[group][old] = whole[group].pop(new)
    monkeypatch.setattr(deprecated, "DEPRECATED", {})
    before = compose.fingerprint_of(whole)
    monkeypatch.setattr(deprecated, "DEPRECATED", OLD)
    assert now.fingerprint == compose.parse(text, "config.yaml").fingerprint == before


def test_a_setting_that_was_removed_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.speed.*is no longer a setting.*set optimizer\.lr instead"):
        experiment(tmp_path, "optimizer.speed=2")
