"""Interface of schedules: functions from a step's number to each parameter group's options."""

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
"""Options of a parameter group that a schedule receives and may set."""


@final
@dataclass(frozen=True)
class Group:
    """Parameter group as a schedule sees it."""

    optimizer: str
    """Name of its optimizer, which is the phase's."""
    index: int
    """Index of the group in its optimizer."""
    base: Mapping[str, Any]
    """Initial values of its `SCHEDULED` options."""


@final
@dataclass(frozen=True)
class Span:
    """Steps that a schedule covers: all of training, or a part of it within `Sequential`."""

    steps_per_epoch: int
    total_steps: int

    def steps(self, duration: int, unit: Unit) -> int:
        """Convert a duration in `unit` to steps."""
        return duration * self.steps_per_epoch if unit == "epoch" else duration

    def time(self, step: int, unit: Unit) -> int:
        """Return the number of whole units before `step`."""
        return step // self.steps_per_epoch if unit == "epoch" else step

    def length(self, unit: Unit) -> int:
        """Return the span in `unit`, rounded up; at least 1."""
        return max(
            1,
            math.ceil(self.total_steps / self.steps_per_epoch)
            if unit == "epoch"
            else self.total_steps,
        )


class Schedule(abc.ABC):
    """Function of time: `before_step(k)` sets the same options whatever steps came before.

    Time is counted in `unit`. With `epoch` the options are constant within an epoch, as when the
    `step()` of a torch scheduler is called once an epoch; with `step` they may change at every
    optimizer step. Steps and epochs are numbered from 0.

    Args:
        unit: Unit of durations, milestones and decays: `epoch` or `step`.

    Raises:
        ConfigError: An argument is out of its range.
    """

    span: Span
    """Steps that the schedule covers, once it is attached."""
    initial_rates: tuple[float, ...] = ()
    """Distinct learning rates of the groups before training, the lowest first."""

    def __init__(self, *, unit: Unit = "epoch") -> None:
        ConfigError.raise_if(
            unit not in ("step", "epoch"), "unit", "is not a unit of time", unit, "step or epoch"
        )
        self.unit: Unit = unit
        self._optimizers: dict[str, Optimizer] = {}
        self._groups: list[Group] = []

    @abc.abstractmethod
    def at(self, step: int, options: Options, group: Group) -> Options:
        """Return the options of `group` at `step`.

        Args:
            step: Optimizer step, counted from the beginning of this schedule's span.
            options: The group's own `SCHEDULED` options, or the result of the previous schedule of
                a `Chained`; not changed in place.
            group: The group.

        Returns:
            The options with their new values.
        """

    def begin(
        self, optimizers: Mapping[str, Optimizer], *, steps_per_epoch: int, total_steps: int
    ) -> None:
        """Attach to the optimizers, and record each group's options as `initial_lr` and so on.

        An optimizer whose state was loaded from a checkpoint keeps the initial options in that
        state.

        Args:
            optimizers: The optimizers by name.
            steps_per_epoch: Steps of an epoch.
            total_steps: Steps of the training.
        """
        self._optimizers = dict(optimizers)
        self._groups = [
            Group(
                name,
                index,
                {
                    # As torch's schedulers do with `initial_lr`
                    key: options.setdefault(
                        f"initial_{key}",
                        float(options[key]) if isinstance(options[key], Tensor) else options[key],
                    )
                    for key in SCHEDULED
                    if key in options
                },
            )
            for name, optimizer in self._optimizers.items()
            for index, options in enumerate(optimizer.param_groups)
        ]
        self.attach(Span(steps_per_epoch, total_steps), self._groups)

    def attach(self, span: Span, groups: list[Group]) -> None:
        """Set the span and the groups. Schedules that combine others attach those too."""
        self.span, self.initial_rates = (
            span,
            tuple(sorted({group.base["lr"] for group in groups if "lr" in group.base})),
        )

    def before_step(self, step: int) -> None:
        """Set the options for optimizer step `step` (from 0). Steps may come in any order."""
        for group in self._groups:
            # Looked up each time, since Optimizer.load_state_dict replaces the dicts.
            target = self._optimizers[group.optimizer].param_groups[group.index]
            for key, value in self.at(step, dict(group.base), group).items():
                # A learning rate on the device: other code holds references to this tensor.
                if isinstance(target[key], Tensor):
                    target[key].fill_(value)
                else:
                    target[key] = value

    def rates(self, step: int, span: Span) -> list[float]:
        """Return the groups' learning rates at `step` if training lasted `span`; sets nothing."""
        own_span = self.span
        self.attach(span, self._groups)
        result = [float(self.at(step, dict(group.base), group)["lr"]) for group in self._groups]
        self.attach(own_span, self._groups)
        return result

    def needs(self) -> Mapping[str, int]:
        """Return the time in `unit`, by setting, that the setting needs to take its full effect.

        Settings that always take effect are left out.
        """
        return {}

    def parts(self) -> Mapping[str, tuple[Schedule, int]]:
        """Return the schedules that this one combines, by name, each with its first step."""
        return {}

    def cautions(self, path: str = "scheduler", steps: int | None = None) -> list[Problem]:
        """Warn of settings that never take full effect, since training ends earlier.

        Args:
            path: Path of the schedule in the config.
            steps: Steps of the training; None: the whole span.

        Returns:
            The warnings.
        """
        available_steps = self.span.total_steps if steps is None else steps
        length = Span(self.span.steps_per_epoch, available_steps).length(self.unit)
        message = (
            f"training has only {length} {self.unit}{'s' * (length != 1)} for it, so it would "
            "not complete"
        )
        hint = f"set at most {length}, train longer, or choose another scheduler"
        problems = [
            Problem(f"{path}.{name}", message, getattr(self, name), hint=hint)
            for name, least in self.needs().items()
            if least > length
        ]
        for name, (schedule, start) in self.parts().items():
            # A schedule that never starts is reported by its milestone.
            if start < available_steps:
                problems += schedule.cautions(
                    f"{path}.schedules.{name}",
                    min(schedule.span.total_steps, available_steps - start),
                )
        return problems

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Process an evaluation's metrics, by name; only a plateau uses them."""
        for schedule, _ in self.parts().values():
            schedule.after_evaluation(metrics)

    def watched_metrics(self, path: str = "scheduler") -> dict[str, str]:
        """Return the metrics that decide the schedule, by path in the config.

        Only a plateau has one.
        """
        metrics = dict[str, str]()
        for name, (schedule, _) in self.parts().items():
            metrics |= schedule.watched_metrics(f"{path}.schedules.{name}")
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state that cannot be computed from the step: empty, except for a plateau."""
        states = {
            name: state
            for name, (schedule, _) in self.parts().items()
            if (state := schedule.state_dict())
        }
        return {"schedules": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        for name, part in state.get("schedules", {}).items():
            self.parts()[name][0].load_state_dict(part)

    def forget_evaluations(self) -> None:
        """Forget past evaluations, because the run continues one that measured something else."""
        for schedule, _ in self.parts().values():
            schedule.forget_evaluations()

    def time(self, step: int) -> int:
        """Return `step` in this schedule's unit."""
        return self.span.time(step, self.unit)


class LearningRate(Schedule):
    """Schedule that sets only the learning rate, from the time in its unit."""

    @abc.abstractmethod
    def rate(self, time: int, lr: float) -> float:
        """Return the learning rate at `time` (in `unit`) of a group whose rate would be `lr`."""

    @final
    def at(self, step: int, options: Options, group: Group) -> Options:
        return {**options, "lr": self.rate(self.time(step), options["lr"])}


def require_whole(noun: str, *, least: int, nullable: bool = False, **arguments: object) -> None:
    """Raise a ConfigError for the first argument of a constructor that is no whole number.

    The caller adds the path in the config.

    Args:
        noun: What the arguments are: `duration`.
        least: The least that they may be.
        nullable: Whether they may be None.
        arguments: The arguments, by name.
    """
    for name, value in arguments.items():
        ConfigError.raise_if(
            not whole(value, least=least) and not (nullable and value is None),
            name,
            f"is not a valid {noun}",
            value,
            f"a whole number of at least {least}{', or null' * nullable}",
        )


def require_number(noun: str, *, most: float = math.inf, **arguments: object) -> None:
    """Do the same for finite numbers from 0 to `most`."""
    for name, value in arguments.items():
        ConfigError.raise_if(
            not number(value, least=0, most=most),
            name,
            f"is not a valid {noun}",
            value,
            "a number of at least 0" if most == math.inf else f"a number from 0 to {most:g}",
        )


def require_milestones(milestones: object) -> None:
    """Raise a ConfigError unless a constructor's `milestones` ascend."""
    ConfigError.raise_if(
        not ascending(milestones),
        "milestones",
        "are not ascending times",
        milestones,
        "whole numbers from 1, each greater than the one before",
    )


def whole(value: object, *, least: int) -> bool:
    """Return whether `value` is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def number(value: object, *, least: float = -math.inf, most: float = math.inf) -> bool:
    """Return whether `value` is a finite number from `least` to `most`."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and least <= value <= most
    )


def ascending(values: object) -> bool:
    """Return whether `values` is a list of whole numbers from 1 in ascending order."""
    if not isinstance(values, list | tuple):
        return False
    items: list[Any] = list(values)  # pyright: ignore[reportUnknownArgumentType]
    return all(whole(item, least=1) for item in items) and all(
        a < b for a, b in itertools.pairwise(items)
    )
