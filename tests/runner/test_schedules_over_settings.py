"""Schedules over drawn settings: torch's own numbers, torch's defaults, and the limits of each setting."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as draw
from samewise_runner_stepped import optimizer, ours, seen, theirs
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as reference

from samewise.runner.errors import ConfigError
from samewise.runner.optim.schedules import (
    ConstantWarmup,
    Cosine,
    Exponential,
    LinearWarmup,
    MultiStep,
    OneCycle,
    Plateau,
    Polynomial,
    Schedule,
    Step,
)

DRAWN = settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate], print_blob=False, suppress_health_check=list(HealthCheck)
)
FEW, MANY = settings(DRAWN, max_examples=25), settings(DRAWN, max_examples=120)
p = functools.partial
SHARES = draw.floats(0, 1)


KINDS: dict[str, tuple[type[Schedule], type[reference.LRScheduler], dict[str, str], dict[str, draw.SearchStrategy[Any]]]] = {
    "step": (Step, reference.StepLR, {}, {"step_size": draw.integers(1, 5), "gamma": SHARES}),
    "multi step": (
        MultiStep,
        reference.MultiStepLR,
        {},
        {"milestones": draw.lists(draw.integers(1, 12), max_size=4, unique=True).map(sorted), "gamma": SHARES},
    ),
    "exponential": (Exponential, reference.ExponentialLR, {}, {"gamma": draw.floats(0.5, 1.1)}),
    "cosine": (Cosine, reference.CosineAnnealingLR, {"t_max": "T_max"}, {"t_max": draw.integers(12, 30), "eta_min": draw.floats(0, 0.5)}),
    "polynomial": (Polynomial, reference.PolynomialLR, {"total": "total_iters"}, {"total": draw.integers(1, 15), "power": draw.floats(0.1, 3)}),
    "linear": (
        LinearWarmup,
        reference.LinearLR,
        {"duration": "total_iters"},
        {"duration": draw.integers(1, 15), "start_factor": draw.floats(0.01, 1), "end_factor": draw.floats(0.01, 1)},
    ),
    "constant": (ConstantWarmup, reference.ConstantLR, {"duration": "total_iters"}, {"duration": draw.integers(1, 15), "factor": draw.floats(0.01, 1)}),
    "one cycle": (
        OneCycle,
        reference.OneCycleLR,
        {"total": "total_steps", "anneal": "anneal_strategy"},
        {
            "max_lr": draw.floats(0.01, 2) | draw.lists(draw.floats(0.01, 2), min_size=3, max_size=3),
            "total": draw.integers(8, 30),
            "pct_start": draw.sampled_from([0.25, 0.3, 0.5]),
            "anneal": draw.sampled_from(["cos", "linear"]),
            "cycle_momentum": draw.booleans(),
            "base_momentum": draw.floats(0.5, 0.9),
            "max_momentum": draw.floats(0.9, 1),
            "div_factor": draw.floats(0.5, 30),
            "final_div_factor": draw.floats(0.5, 1e4),
            "three_phase": draw.booleans(),
        },
    ),
}
LOWEST = {"cosine": 1e-6, "polynomial": 1e-12}
"""Tolerances where a recursion of torch's cancels."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_matches_torchs_numbers(kind: str) -> None:
    mine, torchs, names, choices = KINDS[kind]

    @FEW
    @given(draw.fixed_dictionaries(choices), draw.sampled_from([1, 3]), draw.sampled_from(["step", "epoch"]), draw.sampled_from([p(SGD, momentum=0.5), Adam]))
    def agrees(chosen: dict[str, Any], steps_per_epoch: int, unit: str, kind_of_optimizer: Callable[..., Optimizer]) -> None:
        renamed = {names.get(key, key): value for key, value in chosen.items()}
        lrs, length = (0.1, 0.003, 2.0), 36 if steps_per_epoch == 3 else 12
        a = ours(mine(unit=unit, **chosen), optimizer(*lrs, kind=kind_of_optimizer), steps=length, steps_per_epoch=steps_per_epoch)
        every = steps_per_epoch if unit == "epoch" else 1
        b = theirs(p(torchs, **renamed), optimizer(*lrs, kind=kind_of_optimizer), steps=length, every=every)
        if kind == "one cycle":
            assert a == b, "the same arithmetic: the same bits"
        for left, right in zip(a, b, strict=True):
            assert left == pytest.approx(right, rel=1e-11, abs=LOWEST.get(kind, 1e-300))

    agrees()


NOT_WHOLE = (1.5, True, "3", None, math.nan)
NOT_NUMBERS = ("0.5", True, None, math.nan, math.inf, [0.5])
LIMITS: list[tuple[Callable[..., Schedule], str, tuple[Any, ...], tuple[Any, ...]]] = [
    (Step, "step_size", (1, 90), (0, -1, *NOT_WHOLE)),
    (p(Step, step_size=1), "gamma", (0, 0.5, 2), (-0.1, *NOT_NUMBERS)),
    (MultiStep, "milestones", ([], [1], [1, 2], (3, 9)), ([0], [2, 2], [3, 1], [1.5], [True], 7, "12", None)),
    (p(MultiStep, milestones=[1]), "gamma", (0, 0.5, 2), (-0.1, *NOT_NUMBERS)),
    (Exponential, "gamma", (0, 0.5, 2), (-0.1, *NOT_NUMBERS)),
    (Cosine, "t_max", (1, None), (0, -1, 1.5, True, "3")),
    (Cosine, "eta_min", (0, 0.5), (-0.1, *NOT_NUMBERS)),
    (Polynomial, "total", (1, None), (0, -1, 1.5, True, "3")),
    (Polynomial, "power", (0, 0.5), (-0.1, *NOT_NUMBERS)),
    (LinearWarmup, "duration", (0, 1), (-1, *NOT_WHOLE)),
    (p(LinearWarmup, duration=1), "start_factor", (0, 0.5, 1), (-0.1, 1.1, *NOT_NUMBERS)),
    (p(LinearWarmup, duration=1), "end_factor", (0, 0.5, 1), (-0.1, 1.1, *NOT_NUMBERS)),
    (p(LinearWarmup, duration=1, unit="step"), "within_first_epoch", (False, True), ()),
    (p(LinearWarmup, duration=1, unit="epoch"), "within_first_epoch", (False,), (True,)),
    (ConstantWarmup, "duration", (0, 1), (-1, *NOT_WHOLE)),
    (p(ConstantWarmup, duration=1), "factor", (0, 0.5, 1), (-0.1, 1.1, *NOT_NUMBERS)),
    (OneCycle, "total", (1, None), (0, -1, 1.5, True, "3")),
    (OneCycle, "pct_start", (0, 0.5, 0.9, 1), (-0.1, 1.1, *NOT_NUMBERS)),
    (p(OneCycle, three_phase=True), "pct_start", (0, 0.3, 0.5), (0.6, 1)),
    (OneCycle, "anneal", ("cos", "linear"), ("cosine", None)),
    (OneCycle, "div_factor", (0.5, 1, 25), (0, -0.5, *NOT_NUMBERS)),
    (OneCycle, "final_div_factor", (0.5, 1, 25), (0, -0.5, *NOT_NUMBERS)),
    (OneCycle, "base_momentum", (0, 0.5, 1), (-0.1, 1.1, *NOT_NUMBERS)),
    (OneCycle, "max_momentum", (0, 0.5, 1), (-0.1, 1.1, *NOT_NUMBERS)),
    (Plateau, "metric", ("valid/loss",), ("",)),
    (Plateau, "mode", ("min", "max"), ("lower",)),
    (Plateau, "factor", (0, 0.5, 0.99), (-0.1, 1, 1.5, *NOT_NUMBERS)),
    (Plateau, "patience", (0, 1), (-1, *NOT_WHOLE)),
    (Plateau, "threshold", (0, 0.5), (-0.1, *NOT_NUMBERS)),
    (Plateau, "threshold_mode", ("rel", "abs"), ("relative",)),
    (Plateau, "cooldown", (0, 1), (-1, *NOT_WHOLE)),
    (Plateau, "min_lr", (0, 0.5), (-0.1, *NOT_NUMBERS)),
    (Plateau, "eps", (0, 0.5), (-0.1, *NOT_NUMBERS)),
    (Exponential, "gamma", (1,), ()),
    (p(Exponential, gamma=1), "unit", ("step", "epoch"), ("steps", None)),
]


@pytest.mark.parametrize(("kind", "name", "possible", "impossible"), LIMITS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_setting_is_accepted_up_to_its_limits_and_refused_beyond(
    kind: Callable[..., Schedule], name: str, possible: tuple[Any, ...], impossible: tuple[Any, ...]
) -> None:
    for value in possible:
        kind(**{name: value})
    for value in impossible:
        with pytest.raises(ConfigError) as caught:
            kind(**{name: value})
        assert [problem.path for problem in caught.value.problems] == [name], value


METRICS = draw.lists(draw.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, -1.0]), min_size=6, max_size=30)


PLATEAUS = draw.fixed_dictionaries(
    {
        "mode": draw.sampled_from(["min", "max"]),
        "threshold_mode": draw.sampled_from(["rel", "abs"]),
        "threshold": draw.sampled_from([0.0, 1e-4, 0.25, 0.5, 1.0]),
        "patience": draw.integers(0, 3),
        "cooldown": draw.integers(0, 3),
        "factor": draw.sampled_from([0.0, 0.1, 0.5]),
        "min_lr": draw.sampled_from([0.0, 0.002, 0.05]),
        "eps": draw.sampled_from([0.0, 1e-8, 0.05]),
    }
)


@MANY
@given(METRICS, PLATEAUS)
@example([1.0, 0.5, 1.0, 1.0], {"threshold": 0.5, "patience": 0}).via("a half is no better than a half")
@example([1.0, 1.0, 1.0], {"patience": 0, "factor": 0.5, "eps": 0.05}).via("a reduction by eps is none")
def test_a_plateau_reduces_when_torchs_does(metrics: list[float], chosen: dict[str, Any]) -> None:
    mine, torchs = optimizer(0.1, 0.003, 2.0), optimizer(0.1, 0.003, 2.0)
    schedule, scheduler = Plateau(**chosen), reference.ReduceLROnPlateau(torchs, **chosen)
    schedule.begin({"train": mine}, steps_per_epoch=1, total_steps=len(metrics))
    for step, metric in enumerate(metrics):
        schedule.before_step(step)
        assert seen(mine) == seen(torchs)
        schedule.after_evaluation({"valid/loss": metric})
        scheduler.step(metric)
    schedule.before_step(len(metrics))
    assert seen(mine) == seen(torchs)


def test_a_cycle_with_an_empty_rise_begins_at_the_top() -> None:
    values = ours(OneCycle(pct_start=0.25), optimizer(0.1), steps=4, steps_per_epoch=4)
    assert [lr for lr, _ in values] == pytest.approx([0.1, *(0.1 / 25e4 + (0.1 - 0.1 / 25e4) * (1 + math.cos(math.pi * at / 3)) / 2 for at in (1, 2, 3))])
    assert values[0][1] == 0.85


def test_a_cycle_in_epochs_ends_with_training_and_stays_there() -> None:
    for total, steps in ((None, 40), (10, 60)):
        values = ours(OneCycle(total=total, unit="epoch"), optimizer(0.1), steps=steps, steps_per_epoch=4)
        assert values[36:] == [values[36]] * (steps - 36)
        assert values[36] == pytest.approx([0.1 / 25e4, 0.95])
        assert values[35] != values[36]


def test_cycling_the_momentum_needs_one_in_every_group_and_can_be_off() -> None:
    with pytest.raises(ConfigError) as caught:
        ours(OneCycle(), optimizer(0.1, kind=torch.optim.Adagrad), steps=4, steps_per_epoch=1)
    assert (caught.value.problems[0].path, caught.value.problems[0].value) == ("scheduler.cycle_momentum", True)
    assert len(ours(OneCycle(cycle_momentum=False), optimizer(0.1, kind=torch.optim.Adagrad), steps=4, steps_per_epoch=1)) == 4
