"""Schedules in combination, over several optimizers, with torch's among them, and the requirements for a user's own class."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from samewise_runner_stepped import optimizer, ours, seen
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as reference

from samewise.runner.errors import ConfigError
from samewise.runner.optim.schedules import (
    ByOptimizer,
    Chained,
    Cosine,
    Exponential,
    Group,
    LearningRate,
    Plateau,
    Schedule,
    Sequential,
    Span,
    Step,
    TorchSchedule,
)


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
