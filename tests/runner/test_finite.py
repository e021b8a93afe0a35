"""Nonfinite numbers end a run before they reach the weights or a checkpoint, and are never the best."""

import json
import math
from pathlib import Path

import pytest
import torch
from samewise_runner_keeping import keeper
from samewise_tiny import QUIET

from samewise.runner.callbacks.early_stopping import EarlyStopping
from samewise.runner.optim.gradients import total_norm
from samewise.runner.optim.schedules.plateau import Plateau
from samewise.runner.records import checkpoint
from samewise.runner.training.guards.finite import nonfinite_names

TINY = [*QUIET, "dataset=digits", "transforms=images", "checkpoint.every_steps=1", "max_steps=6", "clip_norm=null"]
MODELS = '''
import torch
from torch import nn

class Spoilt(nn.Module):
    """A linear model. From its `after`-th forward pass in training on something is not finite, and no loss shows it."""

    def __init__(self, what, after=3):
        super().__init__()
        self.head, self.norm, self.zero = nn.Linear(64, 10), nn.BatchNorm1d(64), nn.Parameter(torch.zeros(()))
        self.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.what, self.after = what, after

    def forward(self, pixels):
        flat = pixels.flatten(1)
        self.count += self.training
        now = self.training and self.count >= self.after
        one = torch.eye(10)[0]
        if now and self.what == "infinite gradient":
            one = one * self.zero.sqrt()
        elif now and self.what == "nan gradient":
            one = one * (self.zero * self.zero).sqrt()
        elif self.count == self.after and self.what == "huge gradient":
            one = one * self.zero * 3e38
        else:
            one = one * 0 * self.zero
        normed = self.norm(flat * 1e25 if now and self.what == "statistics" else flat)
        return self.head(flat) + one + 0 * normed.sum(1, keepdim=True)

class Growing(nn.Module):
    """Evaluates to NaN as long as it has seen too little."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, pixels):
        self.seen += self.training
        return self.head(pixels.flatten(1)) * (1.0 if self.training or self.seen > 2 else float("nan"))
'''


@pytest.fixture
def lab(tmp_path, monkeypatch):
    (tmp_path / "lab_not_finite").mkdir()
    (tmp_path / "lab_not_finite" / "__init__.py").write_text(MODELS)
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "spoilt.yaml").write_text("# Spoilt\n_target_: lab_not_finite.Spoilt\nwhat: nothing\nafter: 3\n")
    (tmp_path / "configs" / "model" / "growing.yaml").write_text("# Growing\n_target_: lab_not_finite.Growing\n")
    monkeypatch.syspath_prepend(tmp_path)
    return ["--package", "lab_not_finite", "--config-dir", tmp_path / "configs"]


@pytest.fixture
def train(samewise, lab, tmp_path):
    def run(*overrides: str, name: str = "lab"):
        done = samewise("train", *lab, *TINY, f"run_root={tmp_path}/runs", f"name={name}", *overrides)
        return done, next((tmp_path / "runs" / name).glob("*/"), tmp_path)

    return run


def steps(folder: Path) -> list[int]:
    return [one.step for one in checkpoint.list_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize("what", ["infinite gradient", "nan gradient"])
@pytest.mark.parametrize("more", [(), *(pytest.param(more, marks=pytest.mark.slow) for more in (("clip_norm=1",), ("replicas=2", "strategy=elastic")))])
def test_a_nonfinite_gradient_ends_the_run_before_the_step(train, what, more):
    done, folder = train("model=spoilt", f"model.what={what}", *more)
    assert done.returncode == 1, done.stderr
    assert "step 3: the gradient of zero is not finite" in done.stderr
    assert "learning rate" in done.stderr
    assert steps(folder) == [1, 2]
    for one in checkpoint.list_checkpoints(folder / "checkpoints"):
        assert nonfinite_names(checkpoint.load(one.path)["model"].items()) == ["mask"]
    assert json.loads((folder / "failure.json").read_text())["step"] == 2


def test_a_float16_overflow_is_skipped_and_one_at_any_scale_is_an_error(train):
    done, folder = train("model=spoilt", "model.what=nothing", "precision=fp16", "precision.initial_scale=1e38")
    assert done.returncode == 0, done.stderr
    assert steps(folder)[-1] == 6
    weights = [checkpoint.load(one.path)["model"]["head.weight"] for one in checkpoint.list_checkpoints(folder / "checkpoints")]
    assert all(torch.isfinite(one).all() for one in weights)
    done, _ = train("model=spoilt", "model.what=nan gradient", "precision=fp16", "precision.initial_scale=1e-6", "max_steps=10", name="never")
    assert done.returncode == 1
    assert "the gradient of zero is not finite" in done.stderr


def test_nonfinite_statistics_are_never_saved(train):
    """The variance of batch norm overflows, and its normalised outputs are 0: losses, gradients and metrics stay finite."""
    done, folder = train("model=spoilt", "model.what=statistics")
    assert done.returncode == 1, done.stderr
    assert "step 3: norm.running_var is not finite" in done.stderr
    assert steps(folder) == [1, 2]
    assert not (folder / "summary.json").exists()


def test_weights_that_overflow_in_a_step_are_never_saved(train):
    done, folder = train("model=spoilt", "model.what=huge gradient", "optimizer.lr=100")
    assert done.returncode == 1, done.stderr
    assert "step 3: zero is not finite: no checkpoint" in done.stderr
    assert steps(folder) == [1, 2]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_worse_than_any_number(tmp_path, mode):
    kept = keeper(tmp_path, keep_last=1, keep_best=2, monitor="score", mode=mode)
    for step, score in enumerate([math.nan, math.inf, 1.0, math.nan, -math.inf, math.nan], start=1):
        kept.save(step, {"model": {}}, {"score": score})
    assert (tmp_path / "best").resolve().name == f"step-{5 if mode == 'min' else 2:08d}"
    assert [one.step for one in checkpoint.list_checkpoints(tmp_path)] == ([3, 5, 6] if mode == "min" else [2, 3, 6])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_norm_has_torchs_bits(memory_format):
    from torchvision.models import resnet18

    torch.manual_seed(0)
    gradients = [torch.randn_like(one) for one in resnet18(num_classes=10).to(memory_format=memory_format).parameters()]
    for some in (gradients, gradients[:1], [], [gradients[0].double(), *gradients]):
        assert torch.equal(total_norm(some), torch.nn.utils.get_total_norm(some))


def test_a_first_nan_does_not_stay_best_for_early_stopping_or_a_plateau():
    stopping, plateau = EarlyStopping(patience=2), Plateau(patience=1, threshold=0.0)
    for value in (math.nan, 3.0, math.nan, 2.0, math.nan, 1.0):
        stopping.on_evaluation(None, {"valid/loss": value})
        plateau.after_evaluation({"valid/loss": value})
        assert stopping.stop_reason() is None
    assert plateau.reductions == 0
    for _ in range(2):
        stopping.on_evaluation(None, {"valid/loss": math.nan})
        plateau.after_evaluation({"valid/loss": math.nan})
    assert "has not improved on 1 for 2 evaluations" in str(stopping.stop_reason())
    lowest = EarlyStopping(patience=2)
    for value in (1.0, -math.inf, 0.5, 0.2):
        lowest.on_evaluation(None, {"valid/loss": value})
    assert lowest.stop_reason() == "valid/loss has not improved on -inf for 2 evaluations"
    never = EarlyStopping(patience=1)
    never.on_evaluation(None, {"valid/loss": math.nan})
    assert never.stop_reason() == "valid/loss has not been a finite number in 1 evaluations"
    assert plateau.reductions == 1
