"""Schedules agree with torch's, over whole runs, drawn settings and several groups; alone, combined, and over several optimizers."""

import functools
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as draw
from omegaconf import OmegaConf
from timm.scheduler import CosineLRScheduler
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as reference

from samewise.runner.config.instantiate import instantiate
from samewise.runner.errors import ConfigError
from samewise.runner.optim.schedules import (
    ByOptimizer,
    Chained,
    Constant,
    ConstantWarmup,
    Cosine,
    Exponential,
    Group,
    LearningRate,
    LinearWarmup,
    MultiStep,
    OneCycle,
    Plateau,
    Polynomial,
    Schedule,
    Sequential,
    Span,
    Step,
    TorchSchedule,
)

EPOCHS, STEPS_PER_EPOCH, TOTAL = 30, 4, 120
p = functools.partial


def assert_same(left: list[list[float]], right: list[list[float]], lowest: float = 1e-15) -> None:
    """Equal to within 1e-12 of each value; near zero, where torch's recursions cancel, to within `lowest`."""
    assert len(left) == len(right) == TOTAL
    for step, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a == pytest.approx(b, rel=1e-12, abs=lowest), f"step {step}"


def sequential(*makes: Callable[[Optimizer], reference.LRScheduler], milestones: list[int]) -> Callable[[Optimizer], reference.LRScheduler]:
    return lambda made: reference.SequentialLR(made, [make(made) for make in makes], milestones=milestones)


def chained(*makes: Callable[[Optimizer], reference.LRScheduler]) -> Callable[[Optimizer], reference.LRScheduler]:
    return lambda made: reference.ChainedScheduler([make(made) for make in makes])


def test_one_cycle_without_a_highest_rate_rises_to_the_rate_of_each_group() -> None:
    seen = ours(OneCycle(cycle_momentum=False))
    assert [max(values[index] for values in seen) for index in (0, 2, 4)] == pytest.approx([0.1, 0.003, 2.0], rel=1e-2)
    assert {values[1] for values in seen} == {0.9}


def test_five_epochs_of_warm_up_and_a_cosine_agree_with_torch() -> None:
    mine = Sequential(schedules=[LinearWarmup(start_factor=0.01, duration=5), Cosine()], milestones=[5])
    warm, cosine = p(reference.LinearLR, start_factor=0.01, total_iters=5), p(reference.CosineAnnealingLR, T_max=EPOCHS - 5)
    assert_same(ours(mine), theirs(sequential(warm, cosine, milestones=[5])))


def test_a_cosine_that_counts_the_warm_up_agrees_with_timm() -> None:
    made = optimizer()
    timms = CosineLRScheduler(made, t_initial=EPOCHS, lr_min=0.0, warmup_t=5, warmup_lr_init=0.0)
    expected = list[list[float]]()
    for epoch in range(EPOCHS):
        timms.step(epoch)
        expected += [seen(made)] * STEPS_PER_EPOCH
    mine = Sequential(schedules=[LinearWarmup(start_factor=0.0, duration=5), Cosine()], milestones=[5], restart=False)
    assert_same(ours(mine), expected)


def test_chained_factors_agree_with_torch() -> None:
    mine = Chained(schedules=[LinearWarmup(start_factor=0.1, duration=6), MultiStep(milestones=[4, 9]), Cosine(t_max=100)])
    warm, steps = p(reference.LinearLR, start_factor=0.1, total_iters=6), p(reference.MultiStepLR, milestones=[4, 9])
    assert_same(ours(mine), theirs(chained(warm, steps, p(reference.CosineAnnealingLR, T_max=100))))


@pytest.mark.parametrize(("steps_per_epoch", "warm"), [(2000, 1000), (20, 19), (1, 0)])
def test_a_warm_up_within_the_first_epoch_and_steps_by_epoch_have_known_values(steps_per_epoch: int, warm: int) -> None:
    schedule = Chained(schedules=[LinearWarmup(start_factor=1 / 1000, duration=1000, unit="step", within_first_epoch=True), MultiStep(milestones=[16, 22])])
    made = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    schedule.begin({"train": made}, steps_per_epoch=steps_per_epoch, total_steps=26 * steps_per_epoch)

    def lr(step: int) -> float:
        schedule.before_step(step)
        return made.param_groups[0]["lr"]

    assert lr(0) == pytest.approx(1e-5 if warm else 0.01, rel=1e-12)
    if warm:
        assert lr(warm - 1) == pytest.approx(0.01 * (1 / 1000 + 999 / 1000 * (warm - 1) / warm), rel=1e-12)
    assert lr(warm) == lr(16 * steps_per_epoch - 1) == 0.01
    assert lr(16 * steps_per_epoch) == pytest.approx(1e-3, rel=1e-12)
    assert lr(26 * steps_per_epoch - 1) == pytest.approx(1e-4, rel=1e-12)


def test_cosine_and_polynomial_last_until_training_ends_by_default() -> None:
    assert_same(ours(Cosine(unit="step")), theirs(p(reference.CosineAnnealingLR, T_max=TOTAL), every=1))
    assert_same(ours(Polynomial(unit="epoch")), theirs(p(reference.PolynomialLR, total_iters=EPOCHS)))


def test_plateau_names_a_missing_metric_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'valid/loss'"):
        Plateau(metric="valid/los").after_evaluation({"valid/loss": 1.0, "valid/accuracy": 0.5})


def test_a_plateau_in_a_sequence_counts_its_own_time_and_can_be_resumed() -> None:
    def make() -> tuple[Schedule, Optimizer]:
        schedule = Sequential(schedules=[LinearWarmup(duration=2), Chained(schedules=[Exponential(gamma=0.9), Plateau(patience=1)])], milestones=[2])
        made = optimizer()
        schedule.begin({"train": made}, steps_per_epoch=1, total_steps=20)
        return schedule, made

    whole, made = make()
    expected, states = [], []
    for step in range(20):
        whole.before_step(step)
        expected.append(seen(made))
        states.append(whole.state_dict())
        whole.after_evaluation({"valid/loss": 1.0})
    assert len({round(values[0] / 0.9**step, 12) for step, values in enumerate(expected[2:])}) > 4
    for middle in (1, 2, 9):
        resumed, made = make()
        resumed.load_state_dict(states[middle])
        resumed.after_evaluation({"valid/loss": 1.0})
        for step in range(middle + 1, 20):
            resumed.before_step(step)
            assert seen(made) == expected[step]
            resumed.after_evaluation({"valid/loss": 1.0})


SEEKABLE = [
    lambda: OneCycle(),
    lambda: Sequential(schedules=[LinearWarmup(duration=5, unit="step"), Cosine(unit="step")], milestones=[5], unit="step"),
    lambda: Chained(schedules=[LinearWarmup(duration=3), MultiStep(milestones=[4, 9]), Exponential(gamma=0.99, unit="step")]),
    lambda: TorchSchedule(scheduler=p(reference.CosineAnnealingWarmRestarts, T_0=7), unit="step"),
    lambda: ByOptimizer(schedules={"train": Polynomial(power=2.0)}),
]


@pytest.mark.parametrize("make", SEEKABLE)
def test_seeking_a_step_equals_going_through_all_steps(make: Callable[[], Schedule]) -> None:
    expected = ours(make())
    assert make().state_dict() == {}
    made, schedule = optimizer(), make()
    schedule.begin({"train": made}, steps_per_epoch=STEPS_PER_EPOCH, total_steps=TOTAL)
    for step in (77, 3, 119, 0, 60):
        schedule.before_step(step)
        assert seen(made) == expected[step]


def test_a_schedule_begun_on_a_loaded_optimizer_keeps_the_first_options() -> None:
    made, schedule = optimizer(), Exponential(gamma=0.5, unit="step")
    expected = ours(schedule, made)
    fresh = optimizer()
    fresh.load_state_dict(made.state_dict())
    assert ours(Exponential(gamma=0.5, unit="step"), fresh) == expected
    begun, schedule = optimizer(), Exponential(gamma=0.5, unit="step")
    schedule.begin({"train": begun}, steps_per_epoch=STEPS_PER_EPOCH, total_steps=TOTAL)
    begun.load_state_dict(made.state_dict())
    schedule.before_step(3)
    assert seen(begun) == expected[3]


TORCHS = [
    p(reference.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=9),
    p(reference.CosineAnnealingWarmRestarts, T_0=5, T_mult=2),
    p(reference.LambdaLR, lr_lambda=lambda time: 1 / (1 + time)),
]


@pytest.mark.parametrize("unit", ["step", "epoch"])
@pytest.mark.parametrize("make", TORCHS, ids=lambda made: made.func.__name__)
def test_any_torch_scheduler_can_be_used(make: Callable[..., reference.LRScheduler], unit: str) -> None:
    assert ours(TorchSchedule(scheduler=make, unit=unit)) == theirs(make, every=1 if unit == "step" else STEPS_PER_EPOCH)


def test_each_optimizer_can_have_its_own_schedule() -> None:
    first, second, third = optimizer(), optimizer(kind=Adam), optimizer()
    schedule = ByOptimizer(schedules={"generator": Exponential(gamma=0.5), "critic": OneCycle(max_lr=[1.0, 2.0, 3.0])})
    schedule.begin({"generator": first, "critic": second, "other": third}, steps_per_epoch=1, total_steps=10)
    schedule.before_step(2)
    assert [group["lr"] for group in first.param_groups] == pytest.approx([0.025, 0.00075, 0.5])
    assert second.param_groups[0]["lr"] == pytest.approx(1.0)
    assert [group["lr"] for group in third.param_groups] == [0.1, 0.003, 2.0]


WRONG = [
    (lambda: Sequential(schedules=[Constant(), Constant()], milestones=[]), "milestones"),
    (lambda: Sequential(schedules=[Constant(), 3], milestones=[1]), "schedules.1"),
    (lambda: Chained(schedules=[]), "schedules"),
    (lambda: ours(OneCycle(max_lr=[0.1])), "scheduler.max_lr"),
    (lambda: ours(ByOptimizer(schedules={"trian": Constant()})), "scheduler.schedules.trian"),
    (lambda: ours(TorchSchedule(scheduler=p(reference.ReduceLROnPlateau))), "scheduler.scheduler"),
    (lambda: ours(TorchSchedule(scheduler=p(reference.StepLR, step=3))), "scheduler.scheduler"),
    (lambda: ours(TorchSchedule(scheduler=p(reference.OneCycleLR, max_lr=0.1, total_steps=5))), "scheduler.scheduler"),
]


@pytest.mark.parametrize(("make", "path"), WRONG, ids=[path for _, path in WRONG])
def test_an_impossible_setting_is_named(make: Callable[[], object], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize(
    ("max_lr", "rates", "warned"), [(0.1, (0.1, 0.2), True), (0.1, (0.1, 0.1), False), (None, (0.1, 0.2), False), ([0.1, 0.2], (0.1, 0.2), False)]
)
def test_one_highest_rate_for_groups_with_different_ones_is_warned_about(max_lr, rates, warned) -> None:
    made = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], momentum=0.9)
    schedule = OneCycle(max_lr=max_lr)
    schedule.begin({"train": made}, steps_per_epoch=10, total_steps=20)
    assert [problem.path for problem in schedule.cautions()] == ["scheduler.max_lr"] * warned


CHOICES = sorted((Path(__file__).parents[2] / "configs" / "scheduler").glob("*.yaml"))


def choice(name: str, *overrides: str) -> Schedule:
    path = next(path for path in CHOICES if path.stem == name)
    root = OmegaConf.create({"scheduler": OmegaConf.load(path), "evaluate": {"monitor": "valid/loss", "mode": "min"}})
    root.merge_with_dotlist(list(overrides))
    return instantiate(root.scheduler, "scheduler", allowed=("samewise.runner.optim", "torch.optim"))


@pytest.mark.parametrize("name", [path.stem for path in CHOICES])
def test_every_choice_can_be_run(name: str) -> None:
    schedule = choice(name)
    seen = ours(schedule)
    schedule.after_evaluation({"valid/loss": 1.0})
    stays = ("constant", "plateau", "step", "multi_step")  # the first milestones of the last two are at 30 epochs, where this run ends
    assert (len({values[0] for values in seen}) == 1) == (name in stays)


@pytest.mark.parametrize(
    ("schedule", "total", "told"),
    [
        (LinearWarmup(duration=5), 5, []),
        (LinearWarmup(duration=6), 5, ["scheduler.duration"]),
        (LinearWarmup(duration=900, within_first_epoch=True, unit="step"), 5, []),
        (ConstantWarmup(duration=21, unit="step"), 5, ["scheduler.duration"]),
        (Step(step_size=4), 5, []),
        (Step(step_size=5), 5, ["scheduler.step_size"]),
        (MultiStep(milestones=[2, 4]), 5, []),
        (MultiStep(milestones=[2, 5]), 5, ["scheduler.milestones"]),
        (Cosine(t_max=5), 5, []),
        (Cosine(t_max=6), 5, ["scheduler.t_max"]),
        (Cosine(), 1, []),
        (Polynomial(total=6), 5, ["scheduler.total"]),
        (Sequential(schedules={"warmup": LinearWarmup(duration=2), "decay": Cosine()}, milestones=[2]), 5, []),
        (
            Sequential(schedules={"warmup": LinearWarmup(duration=5), "decay": Cosine(t_max=9)}, milestones=[5]),
            2,
            ["scheduler.milestones", "scheduler.schedules.warmup.duration"],
        ),
        (Sequential(schedules={"warmup": LinearWarmup(duration=2), "decay": Cosine(t_max=4)}, milestones=[2]), 5, ["scheduler.schedules.decay.t_max"]),
        (Chained(schedules=[LinearWarmup(duration=9, unit="step"), MultiStep(milestones=[7])]), 5, ["scheduler.schedules.1.milestones"]),
        (ByOptimizer(schedules={"main": Step(step_size=9)}), 5, ["scheduler.schedules.main.step_size"]),
    ],
)
def test_what_a_schedule_plans_after_the_end_of_training_is_reported(schedule: Schedule, total: int, told: list[str]) -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule.begin({"main": optimizer}, steps_per_epoch=STEPS_PER_EPOCH, total_steps=total * STEPS_PER_EPOCH)
    found = schedule.cautions()
    assert [problem.path for problem in found] == told


MOMENTUM = functools.partial(SGD, momentum=0.9)


def optimizer(*lrs: float, kind: Callable[..., Optimizer] = MOMENTUM) -> Optimizer:
    """With a group for each learning rate."""
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.1, 0.003, 2.0)])


def seen(made: Optimizer) -> list[float]:
    return [value for group in made.param_groups for value in (float(group["lr"]), group.get("momentum", 0.0), *group.get("betas", ()))]


def ours(schedule: Schedule, made: Optimizer | None = None, *, steps: int = 120, steps_per_epoch: int = 4) -> list[list[float]]:
    made = made or optimizer()
    schedule.begin({"train": made}, steps_per_epoch=steps_per_epoch, total_steps=steps)
    return [schedule.before_step(step) or seen(made) for step in range(steps)]


def theirs(make: Callable[[Optimizer], reference.LRScheduler], made: Optimizer | None = None, *, steps: int = 120, every: int = 4) -> list[list[float]]:
    """torch's scheduler, stepped after every `every` steps for as long as it allows."""
    made, values = made or optimizer(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(made)
        for step in range(steps):
            values.append(seen(made))
            made.step()
            if (step + 1) % every == 0 and (step + 1) // every < getattr(scheduler, "total_steps", math.inf):
                scheduler.step()
    return values


DRAWN = settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.explicit, Phase.generate], print_blob=False, suppress_health_check=list(HealthCheck)
)
FEW, MANY = settings(DRAWN, max_examples=25), settings(DRAWN, max_examples=120)
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


class Told(LearningRate):
    """Records what it is attached to, and for how long."""

    def attach(self, span: Span, groups: list[Group]) -> None:
        super().attach(span, groups)
        self.groups = [(group.optimizer, group.index, dict(group.base)) for group in groups]

    def rate(self, time: int, lr: float) -> float:
        return lr * (1 + time)


@pytest.mark.parametrize(("total", "expected"), [(20, [4, 1, 15]), (6, [4, 1, 1]), (2, [4, 1, 1])])
def test_the_parts_of_a_sequence_have_spans_of_at_least_one_step(total: int, expected: list[int]) -> None:
    parts = [Told(unit="step") for _ in range(3)]
    made = optimizer(1.0)
    values = ours(Sequential(schedules=parts, milestones=[4, 5], unit="step"), made, steps=total, steps_per_epoch=2)
    assert [part.span.total_steps for part in parts] == expected
    assert [part.span.steps_per_epoch for part in parts] == [2, 2, 2]
    assert [lr for lr, _ in values] == [1, 2, 3, 4, 1, *range(1, 16)][:total]


def test_the_schedule_of_each_optimizer_only_sees_its_groups() -> None:
    first, second = Told(), Told()
    schedule = ByOptimizer(schedules={"generator": first, "critic": second})
    schedule.begin({"generator": optimizer(0.1, 0.2), "critic": optimizer(0.3)}, steps_per_epoch=3, total_steps=9)
    expected = {"momentum": 0.9, "weight_decay": 0}
    assert first.groups == [("generator", 0, {"lr": 0.1, **expected}), ("generator", 1, {"lr": 0.2, **expected})]
    assert second.groups == [("critic", 0, {"lr": 0.3, **expected})]
    assert schedule.span == first.span == second.span == Span(3, 9)


COMBINED: list[Callable[[Plateau], Schedule]] = [
    lambda plateau: Chained(schedules={"steady": Exponential(gamma=1), "plateau": plateau}),
    lambda plateau: ByOptimizer(schedules={"train": plateau}),
    lambda plateau: Sequential(schedules=[plateau, Exponential(gamma=1)], milestones=[50]),
]


@pytest.mark.parametrize("combine", COMBINED)
def test_a_plateau_within_other_schedules_sees_every_evaluation_and_is_saved(combine: Callable[[Plateau], Schedule]) -> None:
    plateau = Plateau(patience=0, factor=0.5)
    whole, made = combine(plateau), optimizer(1.0)
    whole.begin({"train": made}, steps_per_epoch=1, total_steps=100)
    for _ in range(3):  # before the first step too
        whole.after_evaluation({"valid/loss": 1.0})
    assert plateau.reductions == 2
    again, held = combine(Plateau(patience=0, factor=0.5)), optimizer(1.0)
    again.begin({"train": held}, steps_per_epoch=1, total_steps=100)
    again.load_state_dict(whole.state_dict())
    again.forget_evaluations()
    again.after_evaluation({"valid/loss": 9.0})  # the best so far
    again.before_step(1)
    assert seen(held)[0] == 0.25


def test_a_tensor_learning_rate_is_filled_and_not_replaced() -> None:
    lr = torch.tensor(0.5)
    made = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    values = ours(Exponential(gamma=0.5, unit="step"), made, steps=3, steps_per_epoch=1)
    assert [one[0] for one in values] == [0.5, 0.25, 0.125]
    assert made.param_groups[0]["lr"] is lr
    assert type(made.param_groups[0]["initial_lr"]) is float


def test_a_torch_scheduler_is_a_factor_even_if_the_first_rate_is_zero() -> None:
    mine = Chained(schedules=[Step(step_size=2), TorchSchedule(scheduler=partial(reference.ExponentialLR, gamma=0.5))])
    values = ours(mine, optimizer(1.0), steps=5, steps_per_epoch=1)
    assert [lr for lr, _ in values] == pytest.approx([1, 0.5, 0.025, 0.0125, 0.000625], rel=1e-12)
    mine = Chained(schedules=[Cosine(eta_min=0.5), TorchSchedule(scheduler=partial(reference.ExponentialLR, gamma=0.5))])
    values = ours(mine, optimizer(0.0), steps=5, steps_per_epoch=1)
    assert [lr for lr, _ in values] == pytest.approx([0.5 * math.sin(math.pi * time / 10) ** 2 for time in range(5)]), "nothing to be a factor of"


class Picky(reference.LRScheduler):
    """Asks for an option that no optimizer here has."""

    def __init__(self, made: Optimizer) -> None:
        self.wanted = made.param_groups[0]["centered"]
        super().__init__(made)


class Wrong:
    """Not a scheduler: its step() is not callable, or requires a loss."""

    def __init__(self, made: Optimizer, step: Any) -> None:
        self.step = step


@pytest.mark.parametrize(
    "make",
    [
        partial(reference.StepLR, no_such=3),
        partial(reference.CosineAnnealingWarmRestarts, T_0=-1),
        Picky,
        partial(Wrong, step=3),
        partial(Wrong, step=lambda loss: None),
    ],
    ids=["TypeError", "ValueError", "KeyError", "no step", "a step with a loss"],
)
def test_an_unusable_torch_scheduler_is_refused(make: Callable[[Optimizer], Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ours(TorchSchedule(scheduler=make), optimizer(0.1), steps=2, steps_per_epoch=1)
    assert [problem.path for problem in caught.value.problems] == ["scheduler.scheduler"]
