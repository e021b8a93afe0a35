"""What decides may be the training's means: the same on any number of ranks, killed and resumed; and early stopping by several rules."""

import json
import math
import shutil
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from samewise_tiny import QUIET
from torchmetrics.classification import BinaryF1Score

from samewise.runner.callbacks.early_stopping import EarlyStopping
from samewise.runner.callbacks.training_means import TrainingMeans
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Outcome
from samewise.runner.tracking.journal import logged_values

BY_MEANS = [
    *("experiment=resnet18_digits", *QUIET, "model.width=4", "dataset=generated_classification", "dataset.samples=64", "replicas=4", "batch_size=16"),
    "max_epochs=6",
]
BY_MEANS += [
    *("max_steps=null", "callbacks=[training_means,early_stopping]", "evaluate.monitor=train/mean/loss", "callbacks.early_stopping.patience=3"),
    "+callbacks.early_stopping.min_epochs=5",
]
BY_MEANS += [
    *("callbacks.early_stopping.min_delta=9", "scheduler=plateau", "scheduler.patience=0", "scheduler.threshold=10.0", "checkpoint.every_steps=3"),
    "checkpoint.keep_last=100",
]


def train(samewise, run_root: Path, *overrides: str) -> tuple[dict[str, Any], dict[tuple[int, str], float]]:
    """The summary, and what was logged of losses and means, by step and name."""
    done = samewise("train", *BY_MEANS, f"run_root={run_root}", *overrides, "--json", code=0)
    summary = json.loads(done.stdout)
    compared = {key: summary[key] for key in ("weights_sha256", "steps", "stopped_early", "metrics")}
    return compared, logged_values(next(run_root.glob("*/*/metrics.jsonl")))


def test_checkpoints_early_stopping_and_a_plateau_follow_the_mean_of_an_epoch(samewise, tmp_path) -> None:
    whole, logged = train(samewise, tmp_path / "whole", "strategy=elastic")
    assert whole["steps"] == 20, "it would have stopped at step 16, were it not for min_epochs"
    assert "train/mean/loss has not improved" in whole["stopped_early"]
    assert whole["metrics"]["monitor"] == "train/mean/loss"
    for end in range(4, 21, 4):
        for name in ("loss", "accuracy"):
            steps = [logged[step, f"train/{name}"] for step in range(end - 3, end + 1)]
            assert logged[end, f"train/mean/{name}"] == pytest.approx(fmean(steps), rel=1e-12)
    best = min((logged[end, "train/mean/loss"], end) for end in range(4, 21, 4))
    assert (whole["metrics"]["best"]["train/mean/loss"], whole["metrics"]["best"]["step"]) == best

    assert train(samewise, tmp_path / "ranks", "strategy=elastic", "strategy.nproc=2") == (whole, logged)

    # Killed in the midst of the third epoch
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    (run,) = tmp_path.glob("killed/*/*/")
    (run / "summary.json").unlink()
    for checkpoint in run.glob("checkpoints/step-*"):
        if int(checkpoint.name.removeprefix("step-")) > 9:
            shutil.rmtree(checkpoint)
    assert train(samewise, tmp_path / "killed", "strategy=elastic") == (whole, logged)


def test_a_mean_that_no_callback_adds_is_reported_before_the_first_step(samewise, tmp_path) -> None:
    without = [setting for setting in BY_MEANS if "callbacks" not in setting]
    done = samewise("train", *without, f"run_root={tmp_path}", "callbacks=none", code=2)
    assert "evaluate.monitor: no such metric is computed" in done.stderr


VALUES = {
    "reached": ({"stopping_threshold": 0.5}, [1.0, 0.6, 0.5], "valid/loss has reached 0.5"),
    "an accuracy": ({"stopping_threshold": 0.5, "mode": "max"}, [0.1, 0.4, 0.6], "valid/loss has reached 0.5"),
    "diverged": ({"divergence_threshold": 2.0}, [1.0, 2.0, 2.1], "valid/loss is worse than 2"),
    "not finite": ({"check_finite": True}, [1.0, 0.5, math.nan], "valid/loss is nan, not a finite number"),
    "an infinity": ({"check_finite": True}, [1.0, 0.5, -math.inf], "valid/loss is -inf, not a finite number"),
    "too early": ({"min_steps": 3, "patience": 1}, [1.0, 1.0, 1.0], "valid/loss has not improved on 1 for 2 evaluations"),
}


@pytest.mark.parametrize("rule", VALUES)
def test_each_rule_stops_at_its_evaluation_and_after_a_resume(rule: str) -> None:
    settings, values, reason = VALUES[rule]
    stopping = EarlyStopping(**settings)
    for step, value in enumerate(values, 1):
        assert stopping.stop_reason() is None
        stopping.on_evaluation(SimpleNamespace(step=step, epoch=step), {"valid/loss": value})
    resumed = EarlyStopping(**settings)
    resumed.load_state_dict(stopping.state_dict())
    assert stopping.stop_reason() == resumed.stop_reason() == reason


def test_several_rules_stop_by_whichever_holds_first_and_name_their_own_path(samewise, tmp_path) -> None:
    second = "+callbacks.second={_target_: samewise.runner.callbacks.early_stopping.EarlyStopping, monitor: valid/loss"
    done, _ = train(samewise, tmp_path, f"{second}, divergence_threshold: 0.0}}")
    assert (done["steps"], done["stopped_early"]) == (4, "valid/loss is worse than 0")
    with pytest.raises(AssertionError, match=r"callbacks\.second\.patience: must be at least 1"):
        train(samewise, tmp_path, f"{second}, patience: 0}}")


def test_a_setting_out_of_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="min_steps: must be at least 0"):
        EarlyStopping(min_steps=-1)


def test_a_metric_of_the_users_own_is_computed_from_what_the_parts_of_all_steps_count() -> None:
    class TrainingF1(TrainingMeans):
        def metrics(self) -> dict[str, float]:
            means = super().metrics()
            hits, misses = means["train/mean/hits"], means["train/mean/misses"]
            return {**means, "train/mean/f1": 2 * hits / (2 * hits + misses)}

    generator, metric, callback = torch.Generator().manual_seed(4), BinaryF1Score(), TrainingF1()
    for step, size in enumerate((16, 16, 7)):
        predicted, label = torch.randint(2, (2, size), generator=generator)
        parts = {"hits": (predicted & label).sum().item() / size, "misses": (predicted ^ label).sum().item() / size}
        callback.on_step(None, Outcome(step, {"loss": 1.0, **parts}, size, {}, 0, 0, size))
        metric.update(predicted, label)
        resumed = TrainingF1()
        resumed.load_state_dict(callback.state_dict())
        callback = resumed
    assert callback.metrics()["train/mean/f1"] == pytest.approx(metric.compute().item(), rel=1e-6)
    assert not TrainingMeans.metrics(callback), "an evaluation begins anew"
