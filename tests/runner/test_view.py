"""A callback sees numbers and copies: whatever it does with them, it cannot change the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_tiny import DIGITS
from torch import Tensor

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.build import build
from samewise.runner.training.loop import fit
from samewise.runner.training.run import Run
from samewise.runner.training.state import weights_digest

TINY = [*DIGITS, "model.width=4", "max_steps=4"]


def build_run(folder: Path, *more: str) -> Run:
    project = Project(Path.cwd())
    return build(compose([*TINY, *more], project=project), project, RunFolder(folder))


def values_of(view: RunView) -> dict[str, Any]:
    """Everything public: values of properties, and results of methods that change nothing."""
    names = [name for name in dir(RunView) if not name.startswith("_")]
    values = {name: getattr(view, name) for name in names if not callable(getattr(view, name))}
    return values | {"learning_rates()": view.learning_rates(), "weights()": dict(view.weights()), "copy_model()": view.copy_model()}


def spoil(value: Any) -> None:
    """Change whatever can be changed in place."""
    if isinstance(value, torch.nn.Module):
        spoil(value.state_dict())
    elif isinstance(value, Tensor):
        value.fill_(7)
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value.clear()
    elif isinstance(value, list):
        value[:] = [7.0] * len(value)


class Spoiler(Callback):
    def on_step(self, run: RunView, outcome: Outcome) -> None:
        for value in values_of(run).values():
            spoil(value)

    def on_evaluation(self, run: RunView, metrics: Any) -> None:
        spoil(metrics)
        self.on_step(run, Outcome(0, {}, 0.0, {"gradient_norm": 0.0}, 0, 0, 8))


def test_a_callback_that_spoils_all_it_sees_changes_no_bit(tmp_path: Path) -> None:
    alone, spoilt = build_run(tmp_path / "alone"), build_run(tmp_path / "spoilt")
    spoilt.recorder.callbacks = {"spoiler": Spoiler(), **spoilt.callbacks}
    first, second = fit(alone), fit(spoilt)
    assert weights_digest(alone) == weights_digest(spoilt)
    assert first["metrics"] == second["metrics"]
    assert alone.folder.trace.read_bytes() == spoilt.folder.trace.read_bytes()


@pytest.mark.parametrize("name", ["model", "network", "phases", "strategy", "precision", "recipe", "schedule", "progress", "recorder", "optimizer"])
def test_the_parts_of_training_are_hidden_and_the_error_names_what_is_visible(name: str, tmp_path: Path) -> None:
    view = build_run(tmp_path).recorder.view
    with pytest.raises(AttributeError, match=rf"a callback cannot access '{name}' of a run.*weights"):
        getattr(view, name)
