"""Adapts torch's schedulers, and others with their interface, to functions of time."""

import inspect
from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem

from .base import SCHEDULED, Group, Options, Schedule, Span, Unit


@final
class TorchSchedule(Schedule):
    """Runs a torch scheduler on stand-ins for the optimizers, and reads the values that it sets.

    The scheduler steps once for each unit of time, from the beginning, also after resuming (10
    microseconds a step). It therefore needs no saved state, and rounds as it would have. A
    scheduler that uses metrics or parameters cannot run ahead of training: write a `Schedule` for
    it.

    Args:
        scheduler: The class with its settings, without its optimizer (`_partial_: true` in the
            config).
        unit: Unit of time after which it steps.

    Raises:
        ConfigError: The scheduler cannot be created, its `step` requires an argument, or it cannot
            be stepped to the end of training.
    """

    def __init__(self, *, scheduler: Callable[[Optimizer], Any], unit: Unit = "epoch") -> None:
        super().__init__(unit=unit)
        ConfigError.raise_if(
            not callable(scheduler),
            "scheduler",
            "must be partial, because it gets its optimizer later",
            scheduler,
            "a class with `_partial_: true`",
        )
        self.scheduler = scheduler
        self._defaults: dict[str, dict[str, Any]] = {}
        self._bases: dict[str, list[Options]] = {}
        self._running: dict[str, tuple[_StandIn, Any, int]] = {}

    def attach(self, span: Span, groups: list[Group]) -> None:
        super().attach(span, groups)
        self._bases = {}
        self._running = {}
        for group in groups:
            self._bases.setdefault(group.optimizer, []).append(dict(group.base))
        for name in self._bases:
            self._start(name)

    def at(self, step: int, options: Options, group: Group) -> Options:
        time = self.time(step)
        # A scheduler cannot step back
        if self._running[group.optimizer][2] > time:
            self._start(group.optimizer)
        stand_in, scheduler, now = self._running[group.optimizer]
        for completed in range(now, time):
            try:
                scheduler.step()
            except Exception as error:
                raise ConfigError(
                    Problem(
                        "scheduler.scheduler",
                        f"{type(scheduler).__name__} cannot be stepped beyond {self.unit} "
                        f"{completed}: {error}",
                        expected=f"one for all {self.span.length(self.unit)} {self.unit}s of the "
                        "training",
                    )
                ) from error
        self._running[group.optimizer] = (stand_in, scheduler, time)
        # Groups of a ByOptimizer keep their index within their optimizer.
        group_options = stand_in.param_groups[group.index]
        # Only what the scheduler changes, so that a schedule chained before it keeps its values
        result = {
            **options,
            **{key: group_options[key] for key in options if group_options[key] != group.base[key]},
        }
        # Chained after another schedule, its change of the learning rate applies as a factor.
        if options["lr"] != group.base["lr"] != 0:
            result["lr"] = options["lr"] * (group_options["lr"] / group.base["lr"])
        return result

    def _start(self, name: str) -> None:
        stand_in = _StandIn(self._bases[name])
        try:
            scheduler = self.scheduler(stand_in)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                Problem("scheduler.scheduler", f"cannot be created: {error}", self.scheduler)
            ) from None
        step = getattr(scheduler, "step", None)
        ConfigError.raise_if(
            not callable(step)
            or any(
                parameter.default is parameter.empty
                for parameter in inspect.signature(step).parameters.values()
            ),
            "scheduler.scheduler",
            "its step() requires an argument",
            type(scheduler).__name__,
            "a step() without arguments",
            "use samewise.runner.optim.schedules.Plateau, or subclass Schedule",
        )
        # Torch warns of a scheduler that steps before its optimizer.
        stand_in.step()
        self._running[name] = (stand_in, scheduler, 0)


class _StandIn(Optimizer):
    """Optimizer with the groups' options and nothing to optimise."""

    def __init__(self, groups: list[Options]) -> None:
        super().__init__(
            [{"params": [torch.zeros(())], **options} for options in groups],
            {key: groups[0][key] for key in SCHEDULED if key in groups[0]},
        )

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return cast(None, closure)
