"""Combined schedules: one after another, all at once, or one for each optimizer."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, final

from samewise.runner.errors import ConfigError, Problem, nearest

from .base import Group, Options, Schedule, Span, Unit, require_milestones


@final
class Sequential(Schedule):
    """One schedule after another, as torch's SequentialLR.

    Each starts with the groups' own options.

    Args:
        schedules: The schedules in order, as a list, or as a mapping so that each can be overridden
            by name. A schedule without a duration of its own covers its part of the training.
        milestones: Times in `unit` at which the second, third, ... schedule takes over, ascending;
            one fewer than schedules.
        unit: Unit of the milestones; each schedule has its own unit.
        restart: Whether each schedule counts time from its milestone; false: from the beginning of
            the training, as timm's schedules after a warm-up.
    """

    def __init__(
        self,
        *,
        schedules: Sequence[Schedule] | Mapping[str, Schedule],
        milestones: Sequence[int],
        unit: Unit = "epoch",
        restart: bool = True,
    ) -> None:
        super().__init__(unit=unit)
        self.restart = restart
        self.schedules = _name_schedules(schedules)
        require_milestones(milestones)
        ConfigError.raise_if(
            len(milestones) != len(schedules) - 1,
            "milestones",
            "do not fit the number of schedules",
            milestones,
            f"one fewer than schedules: {len(schedules) - 1}",
        )
        self.milestones = tuple(milestones)
        self._parts = tuple(self.schedules.values())
        self._starts = [0] * len(self.schedules)
        self._active = 0

    def attach(self, span: Span, groups: list[Group]) -> None:
        super().attach(span, groups)
        self._starts = [0, *(span.steps(milestone, self.unit) for milestone in self.milestones)]
        ends = [*self._starts[1:], span.total_steps]
        for schedule, start, end in zip(self._parts, self._starts, ends, strict=True):
            # A shortened training may end before a part starts; the part is then never used.
            part = Span(span.steps_per_epoch, max(1, end - start)) if self.restart else span
            schedule.attach(part, groups)

    def needs(self) -> Mapping[str, int]:
        return {"milestones": max(self.milestones, default=0) + 1}

    def parts(self) -> Mapping[str, tuple[Schedule, int]]:
        return {
            name: (schedule, start if self.restart else 0)
            for (name, schedule), start in zip(self.schedules.items(), self._starts, strict=True)
        }

    def at(self, step: int, options: Options, group: Group) -> Options:
        self._active = bisect_right(self._starts, step) - 1
        start = self._starts[self._active] if self.restart else 0
        return self._parts[self._active].at(step - start, options, group)

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Pass the metrics to the schedule of the last step."""
        self._parts[self._active].after_evaluation(metrics)

    def state_dict(self) -> dict[str, Any]:
        states = super().state_dict()
        # An evaluation may follow the loading of a checkpoint, before a step selects a part.
        return {"active": self._active, **states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._active = state.get("active", self._active)
        super().load_state_dict(state)


class _Parallel(Schedule):
    """Several schedules that share the training's time."""

    schedules: dict[str, Schedule]

    def parts(self) -> Mapping[str, tuple[Schedule, int]]:
        return {name: (schedule, 0) for name, schedule in self.schedules.items()}


@final
class Chained(_Parallel):
    """All schedules at once, as torch's ChainedScheduler: each changes the previous one's result.

    Factors (warm-ups, steps, exponentials, a cosine to 0, ...) therefore multiply, in any order. A
    lowest learning rate (`eta_min`) applies only to the schedule that has it.

    Args:
        schedules: The schedules, as a list or a mapping by name, each in its own unit: a warm-up in
            steps may be chained with milestones in epochs.
    """

    def __init__(self, *, schedules: Sequence[Schedule] | Mapping[str, Schedule]) -> None:
        super().__init__()
        self.schedules = _name_schedules(schedules)

    def attach(self, span: Span, groups: list[Group]) -> None:
        super().attach(span, groups)
        for schedule in self.schedules.values():
            schedule.attach(span, groups)

    def at(self, step: int, options: Options, group: Group) -> Options:
        for schedule in self.schedules.values():
            options = schedule.at(step, options, group)
        return options


@final
class ByOptimizer(_Parallel):
    """A schedule for each optimizer of a recipe that has several.

    Args:
        schedules: Schedules by the name of the optimizer's phase. An optimizer without one keeps
            its learning rate.
    """

    def __init__(self, *, schedules: Mapping[str, Schedule]) -> None:
        super().__init__()
        self.schedules = _name_schedules(schedules)

    def attach(self, span: Span, groups: list[Group]) -> None:
        super().attach(span, groups)
        names = {group.optimizer for group in groups}
        ConfigError.raise_all(
            Problem(
                f"scheduler.schedules.{name}",
                "is not an optimizer of this recipe",
                hint=nearest(name, names),
            )
            for name in sorted(self.schedules.keys() - names)
        )
        for name, schedule in self.schedules.items():
            schedule.attach(span, [group for group in groups if group.optimizer == name])

    def at(self, step: int, options: Options, group: Group) -> Options:
        schedule = self.schedules.get(group.optimizer)
        return schedule.at(step, options, group) if schedule else options


def _name_schedules(schedules: Sequence[Schedule] | Mapping[str, Schedule]) -> dict[str, Schedule]:
    schedule_by_name = (
        dict(schedules)
        if isinstance(schedules, Mapping)
        else {str(index): schedule for index, schedule in enumerate(schedules)}
    )
    ConfigError.raise_if(
        not schedule_by_name, "schedules", "is empty", schedules, "at least one schedule"
    )
    for name, schedule in schedule_by_name.items():
        ConfigError.raise_if(
            not isinstance(schedule, Schedule),  # pyright: ignore[reportUnnecessaryIsInstance] (a config's)
            f"schedules.{name}",
            "is not a schedule",
            schedule,
            "a samewise.runner.optim.schedules.Schedule",
        )
    return schedule_by_name
