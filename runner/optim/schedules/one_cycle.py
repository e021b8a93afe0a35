"""The one-cycle policy: the learning rate rises and falls once, the momentum does the opposite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from samewise.runner.errors import ConfigError, Problem

from .base import Group, Options, Schedule, Span, Unit, number, require, whole

Phase = tuple[float, str, str, str, str]
"""When it ends; learning rate at its beginning and end; momentum at its beginning and end."""


@final
@dataclass(kw_only=True, eq=False)
class OneCycle(Schedule):
    """torch's OneCycleLR (L. Smith, N. Topin: Super-Convergence, arXiv 1708.07120).

    After `total` the last values remain.

    Args:
        max_lr: The highest learning rate, one number or one for each group; None: each group's own
            learning rate.
        total: The length of the cycle, in `unit`; None: to the end of training, or of this
            schedule's part of it.
        pct_start: The share of the cycle in which the learning rate rises.
        anneal: `cos` or `linear`.
        cycle_momentum: Also move the momentum (or Adam's first beta) from `max_momentum` to
            `base_momentum` and back.
        base_momentum: The momentum at the highest learning rate.
        max_momentum: The momentum at both ends.
        div_factor: The first learning rate is the highest over this.
        final_div_factor: The last learning rate is the first over this.
        three_phase: Fall to the first learning rate as fast as it rose, then to the last.
        unit: What `total` counts; each step by default.
    """

    max_lr: float | Sequence[float] | None = None
    total: int | None = None
    pct_start: float = 0.3
    anneal: Literal["cos", "linear"] = "cos"
    cycle_momentum: bool = True
    base_momentum: float = 0.85
    max_momentum: float = 0.95
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False
    unit: Unit = "step"

    def __post_init__(self) -> None:
        super().__init__(unit=self.unit)
        total, share = self.total, self.pct_start
        require(
            total is None or whole(total, least=1),
            "total",
            "is not a valid duration",
            total,
            "a whole number of at least 1, or null",
        )
        require(
            number(share, least=0, most=1),
            "pct_start",
            "is not a valid share",
            share,
            "a number from 0 to 1",
        )
        require(
            not self.three_phase or share <= 0.5,
            "pct_start",
            "leaves no time for the third phase",
            share,
            "at most 0.5 with three_phase",
        )
        require(
            self.anneal in ("cos", "linear"),
            "anneal",
            "is not a known curve",
            self.anneal,
            "cos or linear",
        )
        for name, value in (
            ("div_factor", self.div_factor),
            ("final_div_factor", self.final_div_factor),
        ):
            require(
                number(value) and value > 0,
                name,
                "is not a valid divisor",
                value,
                "a number greater than 0",
            )
        for name, value in (
            ("base_momentum", self.base_momentum),
            ("max_momentum", self.max_momentum),
        ):
            require(
                number(value, least=0, most=1),
                name,
                "is not a valid momentum",
                value,
                "a number from 0 to 1",
            )

    def attach(self, span: Span, groups: list[Group]) -> None:
        super().attach(span, groups)
        if isinstance(self.max_lr, Sequence):
            counts = sorted(
                {
                    1 + max(other.index for other in groups if other.optimizer == group.optimizer)
                    for group in groups
                }
            )
            require(
                counts == [len(self.max_lr)],
                "scheduler.max_lr",
                "must have one value for each parameter group",
                self.max_lr,
                f"{counts} values",
            )
        if self.cycle_momentum and not all(
            "momentum" in group.base or "betas" in group.base for group in groups
        ):
            hint = "set scheduler.cycle_momentum=false"
            raise ConfigError(
                Problem(
                    "scheduler.cycle_momentum",
                    "the optimizer has neither momentum nor betas",
                    True,
                    hint=hint,
                )
            )

    def cautions(self, path: str = "scheduler", steps: int | None = None) -> list[Problem]:
        found = super().cautions(path, steps)
        if self.max_lr is None or isinstance(self.max_lr, Sequence) or len(self.initial_rates) < 2:
            return found
        words, hint = (
            "replaces the different learning rates of the parameter groups",
            f"{path}.max_lr=null: each group's own; or one value for each",
        )
        return [*found, Problem(f"{path}.max_lr", words, self.max_lr, hint=hint)]

    def at(self, step: int, options: Options, group: Group) -> Options:
        (_, lr_from, lr_to, momentum_from, momentum_to), share = self._phase(self.time(step))
        highest = (
            options["lr"]
            if self.max_lr is None
            else self.max_lr[group.index]
            if isinstance(self.max_lr, Sequence)
            else self.max_lr
        )
        first = highest / self.div_factor
        values = {
            "first": first,
            "highest": highest,
            "last": first / self.final_div_factor,
            "base": self.base_momentum,
            "max": self.max_momentum,
        }
        made = {**options, "lr": self._interpolate(values[lr_from], values[lr_to], share)}
        if self.cycle_momentum:
            momentum = self._interpolate(values[momentum_from], values[momentum_to], share)
            made |= (
                {"betas": (momentum, *options["betas"][1:])}
                if "betas" in options
                else {"momentum": momentum}
            )
        return made

    def _phase(self, time: int) -> tuple[Phase, float]:
        """The phase at `time`, and the fraction of it that has passed."""
        total = self.total or self.span.length(self.unit)
        rise = self.pct_start * total - 1
        phases: list[Phase] = [(rise, "first", "highest", "max", "base")]
        if self.three_phase:
            phases.append((2 * self.pct_start * total - 2, "highest", "first", "base", "max"))
        last: Phase = (
            (total - 1, "first", "last", "max", "max")
            if self.three_phase
            else (total - 1, "highest", "last", "base", "max")
        )
        now, start = min(time, total - 1), 0.0
        for phase in phases:
            if now <= phase[0]:
                return phase, _share(now, start, phase[0])
            start = phase[0]
        return last, _share(now, start, last[0])

    def _interpolate(self, start: float, end: float, share: float) -> float:
        if self.anneal == "linear":
            return (end - start) * share + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)


def _share(now: float, start: float, end: float) -> float:
    # a phase of length 0, where torch divides by zero
    return (now - start) / (end - start) if end != start else 1.0
