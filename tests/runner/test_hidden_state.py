"""What decides a loss but is in no checkpoint is found before the first step, and nothing is said of what only looks like it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = """
import torch
from torch import nn


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.head = nn.Flatten(), nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.shift(self.flatten(images)))


class Buffer(Base):
    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64), persistent=self.persistent)

    def shift(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Loose(Buffer):
    persistent = False


class InEvaluation(Base):
    mean = 0.0

    def shift(self, x):
        if not self.training:
            return x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - x.mean(0)


class Counter(Base):
    calls = 0

    def shift(self, x):
        self.calls += self.training
        return x * (1 + self.calls)


class Own(Base):
    drawn_from = None

    def shift(self, x):
        self.drawn_from = self.drawn_from or torch.Generator().manual_seed(0)
        return x + torch.randn(x.shape, generator=self.drawn_from)


class Harmless(Buffer):
    scale, calls, last = None, 0, None

    def shift(self, x):
        self.scale = torch.full((64,), 2.0) if self.scale is None else self.scale
        self.calls += 1
        self.last = super().shift(x) * self.scale
        return nn.functional.dropout(self.last, 0.5, self.training)


class Extra(Base):
    def shift(self, x):
        return x

    def get_extra_state(self):
        return {"mean": 0.0}
"""


@pytest.fixture
def train(tmp_path: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains a model; returns the command's result."""
    (tmp_path / "own.py").write_text(MODELS)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["own"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["recipe=classification", "dataset=digits", "transforms=images", "batch_size=64", "max_steps=2", "device=cpu", "tracking=none", "evaluate.limit=1"]

    def run(name: str, *more: str) -> Any:
        (tmp_path / "configs" / "model").mkdir(parents=True)
        (tmp_path / "configs" / "model" / "own.yaml").write_text(f"# A model\n_target_: own.{name}\n")
        return samewise("train", *given, "evaluate.pictures=false", "model=own", *more, "--config-dir", "configs")

    return run


@pytest.mark.parametrize(
    ("model", "attribute"), [("Loose", "Loose.mean"), ("InEvaluation", "InEvaluation.mean"), ("Counter", "Counter.calls"), ("Own", "Own.drawn_from")]
)
def test_what_no_checkpoint_holds_is_warned_about_by_name_and_the_run_promises_nothing(
    train: Callable[..., Any], samewise: Callable[..., Any], model: str, attribute: str
) -> None:
    done = train(model)
    assert done.returncode == 0, done.stderr
    assert f"warning: model, recipe, transforms ({attribute}" in done.stderr
    assert "a resumed run would go on with other values" in done.stderr
    (summary,) = Path("runs").glob("*/*/summary.json")
    assert json.loads(summary.read_text())["level"] == "none"
    if model == "Counter":
        again = samewise("verify", summary.parent)
        assert (again.returncode, "altered" in again.stdout) == (0, False), again.stdout


@pytest.mark.parametrize("model", ["Buffer", "Harmless"])
@pytest.mark.parametrize("more", [(), ("replicas=2", "strategy=elastic", "precision=bf16", "accumulate=2")])
def test_buffers_caches_and_what_is_only_remembered_are_not_warned_about(train: Callable[..., Any], model: str, more: tuple[str, ...]) -> None:
    done = train(model, *more)
    assert (done.returncode, "warning" in done.stderr) == (0, False), done.stderr
    (summary,) = Path("runs").glob("*/*/summary.json")
    assert json.loads(summary.read_text())["level"] == "R2"


def test_a_model_whose_state_is_no_tensor_is_refused(train: Callable[..., Any]) -> None:
    done = train("Extra")
    assert done.returncode == 2
    assert "error: model: _extra_state is a dict" in done.stderr
    assert not Path("runs").exists()
