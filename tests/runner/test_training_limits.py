"""Settings that limit a training: clipping, skipped steps, a part of each epoch, evaluations and checkpoints between epochs, and time."""

import json
import math
import shutil
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import torch
from samewise_tiny import QUIET, work_in_project
from torch import nn
from torch.optim import SGD
from torchmetrics.classification import BinaryF1Score

from samewise import load
from samewise.runner.callbacks.early_stopping import EarlyStopping
from samewise.runner.callbacks.training_means import TrainingMeans
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.data.order import Shuffled, Truncated
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Outcome, Phase
from samewise.runner.precision import Precision
from samewise.runner.records.folder import RunFolder
from samewise.runner.strategies.base import Tally
from samewise.runner.tracking.journal import logged_values
from samewise.runner.training.build import build
from samewise.runner.training.phase import TrainingPhase

BARE = Project(Path(__file__).resolve().parents[2])
SMALL = [
    *("experiment=resnet18_digits", *QUIET, "model.width=4", "dataset=generated_classification", "dataset.samples=96", "batch_size=16", "max_epochs=4"),
    "max_steps=null",
]


def train(samewise, run_root: Path, *overrides: str, code: int = 0) -> tuple[Path, str]:
    """The folder of the only run, and what was said."""
    done = samewise("train", *SMALL, f"run_root={run_root}", *overrides)
    assert done.returncode == code, done.stderr
    return next(run_root.glob("*/*/config.yaml")).parent, done.stdout + done.stderr


def weights(run: Path) -> str:
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


def traced(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()[1:]]


@pytest.mark.parametrize("setting", ["clip_value=0.5", "clip_adaptive=0.01"])
def test_gradients_are_clipped_as_torch_and_timm_clip_them(setting: str, tmp_path: Path) -> None:
    from timm.utils.agc import adaptive_clip_grad

    run = build(compose([*SMALL, setting], project=BARE), BARE, RunFolder(tmp_path))
    generator = torch.Generator().manual_seed(2)
    shapes = [(4, 3, 3, 3), (5, 4), (7,), ()]
    ours, theirs = ([nn.Parameter(torch.randn(shape, generator=generator.manual_seed(3))) for shape in shapes] for _ in range(2))
    for number, (parameter, other) in enumerate(zip(ours, theirs, strict=True)):
        parameter.grad = 10 ** (number - 2) * torch.randn(parameter.shape, generator=generator)
        other.grad = parameter.grad.clone()
    before = [parameter.grad.clone() for parameter in ours]
    phase = TrainingPhase(0, Phase(), SGD(ours, lr=0.1), clips=run.phases[0].clips)
    phase.condition_gradients(Tally(1.0), Precision())
    if setting == "clip_value=0.5":
        nn.utils.clip_grad_value_(theirs, 0.5)
    else:
        adaptive_clip_grad(theirs, clip_factor=0.01)
    for parameter, other in zip(ours, theirs, strict=True):
        assert torch.equal(parameter.grad, other.grad)
    assert any(not torch.equal(parameter.grad, gradient) for parameter, gradient in zip(ours, before, strict=True))


def test_a_step_whose_loss_is_a_spike_is_skipped_recorded_and_skipped_again_on_resuming(samewise, tmp_path) -> None:
    settings = ["skip_spikes=0.1", "optimizer.lr=3", "checkpoint.every_steps=5", "checkpoint.keep_last=100"]
    run, _ = train(samewise, tmp_path / "whole", *settings)
    logged = logged_values(run / "metrics.jsonl")
    losses = [logged[step, "train/loss"] for step in range(1, 25)]
    expected = [step for step in range(11, 25) if losses[step - 1] > fmean(losses[: step - 1]) + 0.1 * pstdev(losses[: step - 1])]
    assert expected
    assert [step for step in range(1, 25) if (step, "train/skipped") in logged] == expected
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    (killed,) = tmp_path.glob("killed/*/*/")
    (killed / "summary.json").unlink()
    for checkpoint in killed.glob("checkpoints/step-*"):
        if int(checkpoint.name.removeprefix("step-")) > 10:
            shutil.rmtree(checkpoint)
    again, _ = train(samewise, tmp_path / "killed", *settings)
    assert logged_values(again / "metrics.jsonl") == logged
    assert weights(again) == weights(run) != weights(train(samewise, tmp_path / "none", "optimizer.lr=3")[0])


def test_an_epoch_is_cut_to_its_first_batches() -> None:
    whole = Shuffled(range(96), seed=3)
    assert torch.equal(Truncated(whole, 32).indices(5), whole.indices(5)[:32])
    assert len(Truncated(whole, 1000)) == 96


def test_evaluations_between_epochs_and_limited_epochs(samewise, tmp_path) -> None:
    run, said = train(samewise, tmp_path, "loader.limit=4", "evaluate.every_epochs=0.5", "callbacks=progress", "callbacks.progress.names=[valid/loss]")
    logged = logged_values(run / "metrics.jsonl")
    assert [step for step, name in logged if name == "valid/loss"] == [*range(2, 17, 2)]
    assert "epoch 0.5  step 2  valid/loss" in said
    assert "valid/accuracy 0" not in said


@pytest.mark.parametrize("ranks", [["strategy=single"], ["strategy=elastic", "strategy.nproc=2"]])
def test_checkpoints_by_time_and_a_time_limit_change_no_bit(samewise, tmp_path, ranks) -> None:
    ranks = [*ranks, "replicas=2"]
    plain, _ = train(samewise, tmp_path / "plain", *ranks)
    never = ["checkpoint.every_epochs=null", "checkpoint.keep_best=0", "checkpoint.keep_last=100"]
    timed, _ = train(samewise, tmp_path / "timed", *ranks, *never, "checkpoint.every_minutes=1e-6")
    assert len([*timed.glob("checkpoints/step-*")]) >= 10, "ranks agree in one step, and save after it"
    limited = ["callbacks=time_limit", "callbacks.time_limit.minutes=0", *ranks]
    run, said = train(samewise, tmp_path / "limited", *limited, code=3)
    assert "stopped by the time limit of 0 minutes, and saved" in said
    run, _ = train(samewise, tmp_path / "limited", *limited, "callbacks.time_limit.minutes=60")
    assert weights(run) == weights(timed) == weights(plain)
    assert traced(run) == traced(plain)


def test_double_precision_holds_weights_and_batches_and_keeps_its_bits_on_ranks(samewise, tmp_path) -> None:
    run, _ = train(samewise, tmp_path / "one", "precision=fp64", "strategy=elastic", "replicas=2", "optimizer.lr=0.01", "max_epochs=1")
    model, transforms, config = load(run, checkpoint="last")
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64, torch.int64}
    batch = transforms(*hydra.utils.instantiate(config.cfg.dataset.valid))
    assert batch["image"].dtype is torch.float64
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"]).item()
    assert json.loads((run / "summary.json").read_text())["metrics"]["final"]["valid/loss"] == pytest.approx(loss, rel=1e-12)
    again, _ = train(samewise, tmp_path / "two", "precision=fp64", "strategy=elastic", "replicas=2", "optimizer.lr=0.01", "max_epochs=1", "strategy.nproc=2")
    assert weights(again) == weights(run)
    single, _ = train(samewise, tmp_path / "single", "strategy=elastic", "replicas=2", "optimizer.lr=0.01", "max_epochs=1")
    for name, tensor in load(single, checkpoint="last")[0].state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor.to(model.state_dict()[name].dtype), rtol=1e-3, atol=1e-4)


def test_autograd_names_the_operator_whose_gradient_is_not_a_number(samewise, tmp_path, monkeypatch) -> None:
    code = (
        "from torch import nn\n"
        "class Roots(nn.Module):\n"
        "    def __init__(self, **sizes):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Linear(64, 10)\n"
        "    def forward(self, image):\n"
        "        logits = self.linear(image.flatten(1)[:, :64])\n"
        "        return logits + (0 * logits).sqrt()\n"
    )
    work_in_project(tmp_path, monkeypatch, "roots", code)
    mine = [setting for setting in SMALL if not setting.startswith("model")]
    done = samewise("train", *mine, "model={_target_: roots.Roots}", "run_root=runs", "param_groups=none", "reproducibility.detect_anomaly=true")
    assert "MulBackward0' returned nan" in done.stderr
    assert "MulBackward0" not in samewise("train", *mine, "model={_target_: roots.Roots}", "run_root=runs", "param_groups=none", "--fresh").stderr


@pytest.mark.parametrize(
    "setting",
    [
        *("clip_value=-1", "clip_adaptive=0", "skip_spikes=0", "checkpoint.every_minutes=0", "loader.limit=0", "evaluate.every_epochs=0"),
        "evaluate.every_epochs=often",
    ],
)
def test_values_out_of_range_are_refused(samewise, setting: str) -> None:
    done = samewise("check", *SMALL, setting, code=2)
    assert setting.partition("=")[0] in done.stderr


def test_what_changes_a_result_changes_the_fingerprint() -> None:
    def fingerprint(*settings: str) -> str:
        return compose([*SMALL, *settings], project=BARE).fingerprint

    same = ["checkpoint.every_minutes=5", "reproducibility.detect_anomaly=true", "callbacks=time_limit", "callbacks=[progress]"]
    other = ["clip_value=1", "clip_adaptive=0.01", "skip_spikes=5", "loader.limit=3", "evaluate.every_epochs=0.5"]
    assert {fingerprint(setting) for setting in same} == {fingerprint()}
    assert len({fingerprint(), *map(fingerprint, other)}) == 1 + len(other)


def test_learning_rates_are_scaled_with_the_batch(samewise, tmp_path: Path) -> None:
    """Twice the rate, by each rule; the samples of a step do not depend on it."""
    plain = ["scheduler=constant", "~scheduler.pct_start", "~scheduler.cycle_momentum", "max_steps=3", "batch_size=16"]
    rules = {"twice": ["optimizer.lr=0.2"], "linear": ["reference_batch_size=8"], "root": ["reference_batch_size=4", "reference_power=0.5"], "once": []}
    digests = {
        name: weights(train(samewise, tmp_path / name, *plain, *(rule if name == "twice" else ["optimizer.lr=0.1", *rule]))[0]) for name, rule in rules.items()
    }
    assert digests["twice"] == digests["linear"] == digests["root"] != digests["once"]


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


def train_epochs(samewise, run_root: Path, *overrides: str) -> tuple[dict[str, Any], dict[tuple[int, str], float]]:
    """The summary, and what was logged of losses and means, by step and name."""
    done = samewise("train", *BY_MEANS, f"run_root={run_root}", *overrides, "--json", code=0)
    summary = json.loads(done.stdout)
    compared = {key: summary[key] for key in ("weights_sha256", "steps", "stopped_early", "metrics")}
    return compared, logged_values(next(run_root.glob("*/*/metrics.jsonl")))


def test_checkpoints_early_stopping_and_a_plateau_follow_the_mean_of_an_epoch(samewise, tmp_path) -> None:
    whole, logged = train_epochs(samewise, tmp_path / "whole", "strategy=elastic")
    assert whole["steps"] == 20, "it would have stopped at step 16, were it not for min_epochs"
    assert "train/mean/loss has not improved" in whole["stopped_early"]
    assert whole["metrics"]["monitor"] == "train/mean/loss"
    for end in range(4, 21, 4):
        for name in ("loss", "accuracy"):
            steps = [logged[step, f"train/{name}"] for step in range(end - 3, end + 1)]
            assert logged[end, f"train/mean/{name}"] == pytest.approx(fmean(steps), rel=1e-12)
    best = min((logged[end, "train/mean/loss"], end) for end in range(4, 21, 4))
    assert (whole["metrics"]["best"]["train/mean/loss"], whole["metrics"]["best"]["step"]) == best

    assert train_epochs(samewise, tmp_path / "ranks", "strategy=elastic", "strategy.nproc=2") == (whole, logged)

    # Killed in the midst of the third epoch
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    (run,) = tmp_path.glob("killed/*/*/")
    (run / "summary.json").unlink()
    for checkpoint in run.glob("checkpoints/step-*"):
        if int(checkpoint.name.removeprefix("step-")) > 9:
            shutil.rmtree(checkpoint)
    assert train_epochs(samewise, tmp_path / "killed", "strategy=elastic") == (whole, logged)


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
    done, _ = train_epochs(samewise, tmp_path, f"{second}, divergence_threshold: 0.0}}")
    assert (done["steps"], done["stopped_early"]) == (4, "valid/loss is worse than 0")
    with pytest.raises(AssertionError, match=r"callbacks\.second\.patience: must be at least 1"):
        train_epochs(samewise, tmp_path, f"{second}, patience: 0}}")


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
