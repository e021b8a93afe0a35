"""Decreasing learning rates: in steps, steadily, or along a curve.

Each is the closed form of torch's scheduler of the same name.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import final

from samewise.runner.errors import Problem

from .base import LearningRate, Unit, require_milestones, require_number, require_whole


@final
class Constant(LearningRate):
    """The optimizer's own learning rate throughout."""

    def rate(self, time: int, lr: float) -> float:
        return lr


@final
class Step(LearningRate):
    """`lr * gamma ** (time // step_size)`, as torch's StepLR.

    Args:
        step_size: Duration of each learning rate, in `unit`.
        gamma: Factor after each `step_size`.
        unit: Unit of `step_size`.
    """

    def __init__(self, *, step_size: int, gamma: float = 0.1, unit: Unit = "epoch") -> None:
        super().__init__(unit=unit)
        require_whole("duration", least=1, step_size=step_size)
        require_number("factor", gamma=gamma)
        self.step_size, self.gamma = step_size, gamma

    def needs(self) -> Mapping[str, int]:
        # The first reduction takes effect in the unit of time that follows
        return {"step_size": self.step_size + 1}

    def rate(self, time: int, lr: float) -> float:
        return lr * self.gamma ** (time // self.step_size)


@final
class MultiStep(LearningRate):
    """`lr * gamma ** (number of milestones reached)`, as torch's MultiStepLR.

    Args:
        milestones: Times at which the learning rate is multiplied by `gamma`, in `unit`, ascending.
        gamma: Factor at each milestone.
        unit: Unit of the milestones.
    """

    def __init__(
        self, *, milestones: Sequence[int], gamma: float = 0.1, unit: Unit = "epoch"
    ) -> None:
        super().__init__(unit=unit)
        require_milestones(milestones)
        require_number("factor", gamma=gamma)
        self.milestones, self.gamma = tuple(milestones), gamma

    def needs(self) -> Mapping[str, int]:
        return {"milestones": max(self.milestones, default=0) + 1}

    def rate(self, time: int, lr: float) -> float:
        return lr * self.gamma ** bisect_right(self.milestones, time)


@final
class Exponential(LearningRate):
    """`lr * gamma ** time`, as torch's ExponentialLR.

    Args:
        gamma: Factor in each unit of time.
        unit: Unit of time.
    """

    def __init__(self, *, gamma: float, unit: Unit = "epoch") -> None:
        super().__init__(unit=unit)
        require_number("factor", gamma=gamma)
        self.gamma = gamma

    def rate(self, time: int, lr: float) -> float:
        return lr * self.gamma**time


@final
class Cosine(LearningRate):
    """Half a cosine from `lr` down to `eta_min`, as torch's CosineAnnealingLR.

    SGDR without restarts (arXiv 1608.03983). Past `t_max` it rises again, as torch's does.

    Args:
        t_max: Time at which `eta_min` is reached, in `unit`; None: the end of training, or of this
            schedule's part of it.
        eta_min: Lowest learning rate, the same for every group.
        unit: Unit of `t_max`.
    """

    def __init__(
        self, *, t_max: int | None = None, eta_min: float = 0.0, unit: Unit = "epoch"
    ) -> None:
        super().__init__(unit=unit)
        require_whole("duration", least=1, nullable=True, t_max=t_max)
        require_number("learning rate", eta_min=eta_min)
        self.t_max, self.eta_min = t_max, eta_min

    def needs(self) -> Mapping[str, int]:
        return {"t_max": self.t_max or 0}

    def cautions(self, path: str = "scheduler", steps: int | None = None) -> list[Problem]:
        if not self.initial_rates or self.eta_min <= self.initial_rates[0]:
            return super().cautions(path, steps)
        return [
            *super().cautions(path, steps),
            Problem(
                f"{path}.eta_min",
                "is above the learning rate of a parameter group, which rises to it",
                self.eta_min,
                f"at most {self.initial_rates[0]:g}",
            ),
        ]

    def rate(self, time: int, lr: float) -> float:
        turn = math.pi * time / (self.t_max or self.span.length(self.unit))
        # 2 cos^2(x/2) = 1 + cos(x), without the cancellation near the lowest point.
        return self.eta_min + (lr - self.eta_min) * math.cos(turn / 2) ** 2


@final
class Polynomial(LearningRate):
    """`lr * (1 - time / total) ** power`, then 0, as torch's PolynomialLR.

    Args:
        total: Time at which 0 is reached, in `unit`; None: the end of training, or of this
            schedule's part of it.
        power: Exponent; 1 is a straight line.
        unit: Unit of `total`.
    """

    def __init__(
        self, *, total: int | None = None, power: float = 1.0, unit: Unit = "epoch"
    ) -> None:
        super().__init__(unit=unit)
        require_whole("duration", least=1, nullable=True, total=total)
        require_number("power", power=power)
        self.total, self.power = total, power

    def needs(self) -> Mapping[str, int]:
        return {"total": self.total or 0}

    def rate(self, time: int, lr: float) -> float:
        total = self.total or self.span.length(self.unit)
        return lr * (1 - min(time, total) / total) ** self.power
