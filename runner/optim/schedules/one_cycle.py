"""One-cycle policy: the learning rate rises and falls once, the momentum does the opposite."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from samewise.runner.errors import ConfigError, Problem

from .base import Group, Options, Schedule, Span, Unit, number, require_number, require_whole

Phase = tuple[float, str, str, str, str]
"""End of the phase, learning rate at its beginning and end, momentum at its beginning and end."""


@final
@dataclass(kw_only=True, eq=False)
class OneCycle(Schedule):
    """Cycle of torch's OneCycleLR (L. Smith, N. Topin: Super-Convergence, arXiv 1708.07120).

    After `total` the last values remain.

    Args:
        max_lr: Highest learning rate, one number or one for each group; None: each group's own.
        total: Length of the cycle, in `unit`; None: to the end of training, or of this schedule's
            part of it.
        pct_start: Share of the cycle in which the learning rate rises.
        anneal: Shape of the curve, `cos` or `linear`.
        cycle_momentum: Whether the momentum (or Adam's first beta) moves from `max_momentum` to
            `base_momentum` and back.
        base_momentum: Momentum at the highest learning rate.
        max_momentum: Momentum at both ends.
        div_factor: Highest learning rate divided by the first.
        final_div_factor: First learning rate divided by the last.
        three_phase: Whether the learning rate falls to the first as fast as it rose, and only then
            to the last.
        unit: Unit of `total`; a step by default.

    Raises:
        ConfigError: An argument is out of its range, `max_lr` has another number of values than
            groups, or the optimizer has no momentum to move.
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
        require_whole("duration", least=1, nullable=True, total=self.total)
        require_number("share", most=1, pct_start=self.pct_start)
        require_number(
            "momentum", most=1, base_momentum=self.base_momentum, max_momentum=self.max_momentum
        )
        ConfigError.raise_if(
            self.three_phase and self.pct_start > 0.5,
            "pct_start",
            "leaves no time for the third phase",
            self.pct_start,
            "at most 0.5 with three_phase",
        )
        ConfigError.raise_if(
            self.anneal not in ("cos", "linear"),
            "anneal",
            "is not a known curve",
            self.anneal,
            "cos or linear",
        )
        for name in ("div_factor", "final_div_factor"):
            ConfigError.raise_if(
                not number(getattr(self, name)) or getattr(self, name) <= 0,
                name,
                "is not a valid divisor",
                getattr(self, name),
                "a number greater than 0",
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
            ConfigError.raise_if(
                counts != [len(self.max_lr)],
                "scheduler.max_lr",
                "must have one value for each parameter group",
                self.max_lr,
                f"{counts} values",
            )
        ConfigError.raise_if(
            self.cycle_momentum
            and not all("momentum" in group.base or "betas" in group.base for group in groups),
            "scheduler.cycle_momentum",
            "the optimizer has neither momentum nor betas",
            True,
            hint="set scheduler.cycle_momentum=false",
        )

    def cautions(self, path: str = "scheduler", steps: int | None = None) -> list[Problem]:
        problems = super().cautions(path, steps)
        if self.max_lr is None or isinstance(self.max_lr, Sequence) or len(self.initial_rates) < 2:
            return problems
        return [
            *problems,
            Problem(
                f"{path}.max_lr",
                "replaces the different learning rates of the parameter groups",
                self.max_lr,
                hint=f"{path}.max_lr=null: each group's own; or one value for each",
            ),
        ]

    def at(self, step: int, options: Options, group: Group) -> Options:
        (_, lr_from, lr_to, momentum_from, momentum_to), share = self._phase(self.time(step))
        highest = (
            options["lr"]
            if self.max_lr is None
            else self.max_lr[group.index]
            if isinstance(self.max_lr, Sequence)
            else self.max_lr
        )
        start = highest / self.div_factor
        values = {
            "first": start,
            "highest": highest,
            "last": start / self.final_div_factor,
            "base": self.base_momentum,
            "max": self.max_momentum,
        }
        result = {**options, "lr": self._interpolate(values[lr_from], values[lr_to], share)}
        if self.cycle_momentum:
            momentum = self._interpolate(values[momentum_from], values[momentum_to], share)
            result |= (
                {"betas": (momentum, *options["betas"][1:])}
                if "betas" in options
                else {"momentum": momentum}
            )
        return result

    def _phase(self, time: int) -> tuple[Phase, float]:
        """Return the phase at `time`, and the fraction of it that has passed."""
        total = self.total or self.span.length(self.unit)
        # Torch numbers the cycle's steps from 0, so phases end one step early.
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
    # Torch divides by zero in a phase of length 0.
    return (now - start) / (end - start) if end != start else 1.0
