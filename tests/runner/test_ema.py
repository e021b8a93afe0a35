"""The average of the weights is the one its settings describe, and is useful for any number of steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from samewise.runner.callbacks.ema import ExponentialMovingAverage
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.build import build
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
