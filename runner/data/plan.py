"""Divides epochs into steps and steps into micro-batches, as arithmetic on the step's number."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from samewise.runner.errors import ConfigError


@dataclass(frozen=True)
class Plan:
    """Division of epochs into steps, and of each step evenly into micro-batches."""

    samples: int
    """Samples of an epoch."""
    batch_size: int
    """Samples of a step."""
    micro_batches: int
    drop_last: bool
    """Whether an epoch's last, smaller batch is dropped."""

    def __post_init__(self) -> None:
        ConfigError.raise_if(
            self.steps_per_epoch == 0,
            "batch_size",
            f"is larger than the training split, which has {self.samples} samples, so an "
            "epoch would have no steps",
            self.batch_size,
            f"at most {self.samples}",
            "set loader.drop_last=false to train on smaller batches",
        )

    @cached_property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def size(self, step: int) -> int:
        """Return the number of a step's samples; `step` counts from 0."""
        return min(self.batch_size, self.samples - step % self.steps_per_epoch * self.batch_size)

    def bounds(self, step: int, micro_batch: int) -> tuple[int, int, int]:
        """Return (epoch, start, stop), the micro-batch's positions in the epoch's order.

        `step` counts from 0.
        """
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.batch_size
        size = self.size(step)
        return (
            epoch,
            start + micro_batch * size // self.micro_batches,
            start + (micro_batch + 1) * size // self.micro_batches,
        )

    @cached_property
    def fills_all(self) -> bool:
        """Whether every micro-batch of every step has samples, even of a smaller last batch."""
        return (
            self.drop_last
            or self.samples % self.batch_size == 0
            or self.samples % self.batch_size >= self.micro_batches
        )

    def with_samples(self, step: int) -> Sequence[int]:
        """Return the numbers of a step's micro-batches that have samples."""
        numbers = range(self.micro_batches)
        return (
            numbers
            if self.fills_all
            else [number for number in numbers if not self.is_empty(step, number)]
        )

    def is_empty(self, step: int, micro_batch: int) -> bool:
        """Return whether the micro-batch has no samples, as in an epoch's last batch."""
        _, start, stop = self.bounds(step, micro_batch)
        return start == stop
