"""Schedules agree with torch's, over whole runs and for several groups, and are functions of the step."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from samewise_runner_stepped import optimizer, ours, seen, theirs
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
    LinearWarmup,
    MultiStep,
    OneCycle,
    Plateau,
    Polynomial,
    Schedule,
    Sequential,
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
