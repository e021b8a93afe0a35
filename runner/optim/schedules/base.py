"""The interface of schedules: a function from a step's number to the options of each parameter
group.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from torch import Tensor
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem

Unit = Literal["step", "epoch"]
Options = dict[str, Any]

SCHEDULED: Final = ("lr", "momentum", "betas", "weight_decay")
"""The options of a parameter group that a schedule sees and may set."""


@final
@dataclass(frozen=True)
class Group:
    """A parameter group as a schedule sees it: the optimizer's name (its phase's), its index in it,
    and the initial values of its `SCHEDULED` options.
    """

    optimizer: str
    index: int
    base: Mapping[str, Any]


@final
@dataclass(frozen=True)
class Span:
    """The steps that a schedule covers: all of training, or a part of it within `Sequential`."""

    steps_per_epoch: int
    total_steps: int

    def steps(self, duration: int, unit: Unit) -> int:
        """Convert a duration in `unit` to steps."""
        return duration * self.steps_per_epoch if unit == "epoch" else duration

    def time(self, step: int, unit: Unit) -> int:
        """The number of whole units before `step`."""
        return step // self.steps_per_epoch if unit == "epoch" else step

    def length(self, unit: Unit) -> int:
        """The span in `unit`, rounded up; at least 1."""
        return max(
            1,
            math.ceil(self.total_steps / self.steps_per_epoch)
            if unit == "epoch"
            else self.total_steps,
        )


class Schedule(abc.ABC):
    """A function of time: `before_step(k)` sets the same options whether or not the steps before
    `k` were taken.

    Time is counted in `unit`: with `epoch` the options are constant within an epoch, as when
    `.step()` of a torch scheduler is called once an epoch; with `step` they may change at every
    optimizer step. Steps and epochs are numbered from 0.

    Args:
        unit: `epoch` or `step`: what durations, milestones and decays count.
    """

    span: Span
    """What it governs, once it is attached."""
    initial_rates: tuple[float, ...] = ()
    """The different learning rates of the groups before training, the lowest first."""

    def __init__(self, *, unit: Unit = "epoch") -> None:
        require(unit in ("step", "epoch"), "unit", "is not a unit of time", unit, "step or epoch")
        self.unit: Unit = unit
        self._optimizers: dict[str, Optimizer] = {}
        self._groups: list[Group] = []

    @abc.abstractmethod
    def at(self, step: int, options: Options, group: Group) -> Options:
        """The options of `group` at `step`, computed from `options`: its own, or the result of an
        earlier schedule of a `Chained`.

        Args:
            step: The optimizer step, counted from the beginning of this schedule's span.
            options: Those of `SCHEDULED` that the group has; not changed in place.
            group: Which group it is.
        """

    def begin(
        self, optimizers: Mapping[str, Optimizer], *, steps_per_epoch: int, total_steps: int
    ) -> None:
        """Attach to the optimizers, and record each group's options as `initial_lr` and so on.

        An optimizer whose state was loaded from a checkpoint already carries its initial options;
        they are kept.
        """
        self._optimizers = dict(optimizers)
        self._groups = [
            Group(
                name,
                index,
                {
                    key: options.setdefault(f"initial_{key}", _plain(options[key]))
                    for key in SCHEDULED
                    if key in options
                },
            )
            for name, optimizer in self._optimizers.items()
            for index, options in enumerate(optimizer.param_groups)
        ]
        self.attach(Span(steps_per_epoch, total_steps), self._groups)

    def attach(self, span: Span, groups: list[Group]) -> None:
        """Set the groups and the span. Schedules made of others attach those too."""
        self.span, self.initial_rates = (
            span,
            tuple(sorted({group.base["lr"] for group in groups if "lr" in group.base})),
        )

    def before_step(self, step: int) -> None:
        """Set the options for optimizer step `step` (from 0), in any order."""
        for group in self._groups:
            options = self.at(step, dict(group.base), group)
            # looked up each time: Optimizer.load_state_dict replaces the dicts
            _assign(self._optimizers[group.optimizer].param_groups[group.index], options)

    def rates(self, step: int, span: Span) -> list[float]:
        """The groups' learning rates at `step` if training lasted `span`; sets nothing."""
        own = self.span
        self.attach(span, self._groups)
        found = [float(self.at(step, dict(group.base), group)["lr"]) for group in self._groups]
        self.attach(own, self._groups)
        return found

    def needs(self) -> Mapping[str, int]:
        """By setting: how long training must be, in `unit`, for it to have its full effect.

        Settings that always do are left out.
        """
        return {}

    def parts(self) -> Mapping[str, tuple[Schedule, int]]:
        """By name: the schedules that this one consists of, each with its first step."""
        return {}

    def cautions(self, path: str = "scheduler", steps: int | None = None) -> list[Problem]:
        """What it is set to do at `path` of the config but will not, since training ends earlier.

        Training lasts so many steps (None: its whole span).
        """
        left = self.span.total_steps if steps is None else steps
        length = Span(self.span.steps_per_epoch, left).length(self.unit)
        words = (
            f"training has only {length} {self.unit}{'s' * (length != 1)} for it, so it would "
            "not complete"
        )
        hint = f"set at most {length}, train longer, or choose another scheduler"
        found = [
            Problem(f"{path}.{name}", words, getattr(self, name), hint=hint)
            for name, least in self.needs().items()
            if least > length
        ]
        for name, (schedule, start) in self.parts().items():
            if start < left:  # otherwise its start is reported
                found += schedule.cautions(
                    f"{path}.schedules.{name}", min(schedule.span.total_steps, left - start)
                )
        return found

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Process an evaluation's metrics; only a plateau uses them."""

    def watched_metrics(self, path: str = "scheduler") -> dict[str, str]:
        """By path in the config: the metrics of evaluations that decide it and the schedules that
        it consists of; only a plateau has one.
        """
        found = dict[str, str]()
        for name, (schedule, _) in self.parts().items():
            found |= schedule.watched_metrics(f"{path}.schedules.{name}")
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state that cannot be computed from the step: empty, except for a plateau."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def forget_evaluations(self) -> None:
        """Forget what evaluations gave: the run continues one that measured something else."""

    def time(self, step: int) -> int:
        """`step` in this schedule's unit."""
        return self.span.time(step, self.unit)


class LearningRate(Schedule):
    """A schedule that sets only the learning rate, from the time in its unit."""

    @abc.abstractmethod
    def rate(self, time: int, lr: float) -> float:
        """The learning rate at `time` (in `unit`) of a group whose learning rate would be `lr`."""

    @final
    def at(self, step: int, options: Options, group: Group) -> Options:
        return {**options, "lr": self.rate(self.time(step), options["lr"])}


def require(holds: bool, argument: str, message: str, value: object, expected: str) -> None:
    """Raise a ConfigError about a constructor's `argument` unless `holds`.

    The caller adds the path in the config.
    """
    if not holds:
        raise ConfigError(Problem(argument, message, value, expected))


def whole(value: object, *, least: int) -> bool:
    """Whether `value` is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def number(value: object, *, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether `value` is a finite number from `least` to `most`."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and least <= value <= most
    )


def ascending(values: object) -> bool:
    """Whether `values` is a list of whole numbers from 1, each greater than the one before."""
    if not isinstance(values, list | tuple):
        return False
    items: list[Any] = list(values)  # pyright: ignore[reportUnknownArgumentType]
    return all(whole(item, least=1) for item in items) and all(
        a < b for a, b in itertools.pairwise(items)
    )


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _assign(target: dict[str, Any], options: Options) -> None:
    for key, value in options.items():
        held = target[key]
        if isinstance(
            held, Tensor
        ):  # a learning rate on the device: others hold a reference to this tensor
            held.fill_(value)
        else:
            target[key] = value
