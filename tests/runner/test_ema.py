"""Averages of the weights; and nonfinite numbers, which end a run before they reach the weights or a checkpoint, and are never the best."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_keeping import keeper
from samewise_tiny import QUIET
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from samewise.runner.callbacks.early_stopping import EarlyStopping
from samewise.runner.callbacks.ema import ExponentialMovingAverage
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.optim.gradients import total_norm
from samewise.runner.optim.schedules.plateau import Plateau
from samewise.runner.records import checkpoint
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.build import build
from samewise.runner.training.guards.finite import nonfinite_names
from samewise.runner.training.loop import fit

BARE = Project(Path(__file__).resolve().parents[2])
STEPS, PER_EPOCH, BATCH, EPOCHS = 20, 4, 16, 20
TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=ema", "evaluate.every_epochs=null")


class Seen(Callback):
    """The weights and buffers after each step, the initial ones first."""

    def on_start(self, run: RunView) -> None:
        self.states = [_as_doubles(dict(run.weights()))]

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        self.states.append(_as_doubles(dict(run.weights())))


def _as_doubles(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().double() for name, tensor in state.items()}


def by_shares(states: list[dict[str, Tensor]], shares: dict[int, float]) -> dict[str, Tensor]:
    """The mean of the weights after some steps (0: the initial ones), weighted by their shares."""
    assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
    return {name: sum(share * states[step][name] for step, share in shares.items()) for name in states[0]}


def recursive(updates: list[int], decay: float) -> dict[int, float]:
    """The shares of `averaged = decay * averaged + (1 - decay) * weights`, beginning with the initial weights, or those after a first step."""
    shares = {updates[0]: 1.0}
    for step in updates[1:]:
        shares = {other: decay * share for other, share in shares.items()} | {step: 1 - decay}
    return shares


def powers(updates: list[int], horizon: float) -> dict[int, float]:
    """The n-th of N updates has the share (n/N)^a - ((n-1)/N)^a; their mean age is N / (a + 1)."""
    a, whole = 1 / horizon - 1, len(updates)
    return {step: (n / whole) ** a - ((n - 1) / whole) ** a for n, step in enumerate(updates, 1)}


EACH = list(range(STEPS + 1))
RULES: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    "the default": ({}, powers(EACH[1:], 0.05)),
    "a horizon": ({"horizon": 0.25, "every_steps": 3}, powers([3, 6, 9, 12, 15, 18], 0.25)),
    "a horizon after a warm-up": ({"horizon": 0.25, "every_steps": 3, "warmup_epochs": 2}, powers([9, 12, 15, 18], 0.25)),
    "a decay": ({"decay": 0.9}, recursive(EACH, 0.9)),
    "a decay after a warm-up": ({"decay": 0.9, "every_steps": 2, "warmup_epochs": 1}, recursive([4, *range(6, 21, 2)], 0.9)),
    "a rescaled decay": ({"decay": 0.97, "every_steps": 5, "rescale": True}, recursive([0, 5, 10, 15, 20], 1 - 0.03 * BATCH * 5 / EPOCHS)),
    "a decay rescaled beyond its bound": ({"decay": 0.5, "every_steps": 5, "rescale": True}, {20: 1.0}),
    "no decay at all": ({"decay": 0.0}, {20: 1.0}),
    "stochastic weight averaging": ({"name": "swa", "horizon": 0.5, "every_epochs": 1, "warmup_epochs": 2}, {12: 1 / 3, 16: 1 / 3, 20: 1 / 3}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """The weights after each step of a run, and the averages by each rule."""
    run = build(compose(TINY, project=BARE), BARE, RunFolder(tmp_path_factory.mktemp("run")))
    assert (run.total_steps, run.plan.steps_per_epoch, run.batch_size, run.config.max_epochs) == (STEPS, PER_EPOCH, BATCH, EPOCHS)
    node = {key: value for key, value in run.config.callbacks.ema.items() if key != "_target_"}
    averages = {rule: ExponentialMovingAverage(**(node | settings)) for rule, (settings, _) in RULES.items()}
    for average in averages.values():
        average.on_build(run.recorder.view)
    seen = Seen()
    run.callbacks.clear()
    run.callbacks.update(averages, seen=seen)
    fit(run)
    return seen.states, {rule: dict(next(iter(average.models().values())).state_dict()) for rule, average in averages.items()}


@pytest.mark.parametrize("rule", RULES)
def test_the_average_matches_the_textbook(rule: str, trained: tuple[list[dict[str, Tensor]], dict[str, dict[str, Tensor]]]) -> None:
    states, averages = trained
    shares = RULES[rule][1]
    wanted = by_shares(states, shares)
    for name, tensor in averages[rule].items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-5, atol=1e-6)
        else:
            assert tensor.item() == states[max(shares)][name].item()  # a count


def test_stochastic_weight_averaging_matches_torchs(trained: tuple[list[dict[str, Tensor]], dict[str, dict[str, Tensor]]]) -> None:
    states, averages = trained
    names = [name for name, tensor in averages["stochastic weight averaging"].items() if tensor.is_floating_point()]
    model = nn.ParameterList([nn.Parameter(states[0][name].float()) for name in names])
    theirs = AveragedModel(model)
    for step in (12, 16, 20):
        model.load_state_dict({str(number): states[step][name] for number, name in enumerate(names)})
        theirs.update_parameters(model)
    for name, tensor in zip(names, theirs.module.parameters(), strict=True):
        torch.testing.assert_close(averages["stochastic weight averaging"][name], tensor.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "given",
    ["+callbacks.ema.horizon=1.5", "callbacks.ema.rescale=true", "callbacks.ema.decay=2", "callbacks.ema.every_steps=0", "+callbacks.ema.every_epochs=0"],
)
def test_invalid_or_contradictory_settings_are_refused(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build(compose([*TINY, given], project=BARE), BARE, RunFolder(tmp_path))
    assert error.value.problems[0].path == given.lstrip("+").partition("=")[0]
    with pytest.raises(ConfigError, match="has no effect together with a decay"):
        build(compose([*TINY, "callbacks.ema.decay=0.9", "+callbacks.ema.horizon=0.1"], project=BARE), BARE, RunFolder(tmp_path))


FINITE = [*QUIET, "dataset=digits", "transforms=images", "checkpoint.every_steps=1", "max_steps=6", "clip_norm=null"]
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
        done = samewise("train", *lab, *FINITE, f"run_root={tmp_path}/runs", f"name={name}", *overrides)
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
