"""Learning rates that start low: for a `Chained` with a decay, or first in a `Sequential`."""

from collections.abc import Mapping
from typing import final

from samewise.runner.errors import ConfigError

from .base import LearningRate, Unit, require_number, require_whole


@final
class LinearWarmup(LearningRate):
    """Linear rise from `start_factor * lr` to `end_factor * lr`, as torch's LinearLR.

    The learning rate is constant afterwards.

    Args:
        duration: Length of the rise, in `unit`; 0 for no warm-up.
        start_factor: Factor at time 0.
        end_factor: Factor from `duration` on.
        within_first_epoch: Whether to shorten the warm-up to the first epoch less one step, where
            that is shorter than `duration` (as torchvision's detection reference does). With
            `unit=step` only.
        unit: Unit of `duration`.
    """

    def __init__(
        self,
        *,
        duration: int,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        within_first_epoch: bool = False,
        unit: Unit = "epoch",
    ) -> None:
        super().__init__(unit=unit)
        require_whole("duration", least=0, duration=duration)
        require_number("factor", most=1, start_factor=start_factor, end_factor=end_factor)
        ConfigError.raise_if(
            unit != "step" and within_first_epoch,
            "within_first_epoch",
            "applies only to a warm-up counted in steps",
            unit,
            "unit: step",
        )
        self.duration, self.start_factor, self.end_factor, self.within_first_epoch = (
            duration,
            start_factor,
            end_factor,
            within_first_epoch,
        )

    def needs(self) -> Mapping[str, int]:
        return {} if self.within_first_epoch else {"duration": self.duration}

    def rate(self, time: int, lr: float) -> float:
        duration = (
            min(self.duration, self.span.steps_per_epoch - 1)
            if self.within_first_epoch
            else self.duration
        )
        if time >= duration:
            return lr * self.end_factor
        return lr * (self.start_factor + (self.end_factor - self.start_factor) * time / duration)


@final
class ConstantWarmup(LearningRate):
    """`factor * lr` for `duration`, then `lr`, as torch's ConstantLR.

    Args:
        duration: Length of the warm-up, in `unit`.
        factor: Factor until then.
        unit: Unit of `duration`.
    """

    def __init__(self, *, duration: int, factor: float = 1 / 3, unit: Unit = "epoch") -> None:
        super().__init__(unit=unit)
        require_whole("duration", least=0, duration=duration)
        require_number("factor", most=1, factor=factor)
        self.duration, self.factor = duration, factor

    def needs(self) -> Mapping[str, int]:
        return {"duration": self.duration}

    def rate(self, time: int, lr: float) -> float:
        return lr * (self.factor if time < self.duration else 1.0)
