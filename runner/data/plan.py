"""Splits an epoch into steps and a step into micro-batches: arithmetic on the step's number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from samewise.runner.errors import ConfigError, Problem


@dataclass(frozen=True)
class Plan:
    """Splits epochs of `samples` into steps of `batch_size`, and each step evenly into
    `micro_batches`; `drop_last` drops an epoch's last, smaller batch.
    """

    samples: int
    batch_size: int
    micro_batches: int
    drop_last: bool

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            reason = (
                f"is larger than the training split, which has {self.samples} samples, so an "
                "epoch would have no steps"
            )
            expected, hint = (
                f"at most {self.samples}",
                "set loader.drop_last=false to train on smaller batches",
            )
            raise ConfigError(Problem("batch_size", reason, self.batch_size, expected, hint))

    @cached_property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def size(self, step: int) -> int:
        """The number of a step's samples; `step` counts from 0."""
        return min(self.batch_size, self.samples - step % self.steps_per_epoch * self.batch_size)

    def bounds(self, step: int, micro_batch: int) -> tuple[int, int, int]:
        """(epoch, start, stop): the micro-batch's positions in the epoch's order.

        `step` counts from 0.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        size = self.size(step)
        return (
            epoch,
            first + micro_batch * size // self.micro_batches,
            first + (micro_batch + 1) * size // self.micro_batches,
        )

    @cached_property
    def fills_all(self) -> bool:
        """Whether every micro-batch of every step has samples: an epoch's last batch may be too
        small.
        """
        return (
            self.drop_last
            or self.samples % self.batch_size == 0
            or self.samples % self.batch_size >= self.micro_batches
        )

    def with_samples(self, step: int) -> Sequence[int]:
        """The numbers of a step's micro-batches that have samples."""
        every = range(self.micro_batches)
        return (
            every
            if self.fills_all
            else [number for number in every if not self.is_empty(step, number)]
        )

    def is_empty(self, step: int, micro_batch: int) -> bool:
        """Whether the micro-batch has no samples, in an epoch's last batch."""
        _, start, stop = self.bounds(step, micro_batch)
        return start == stop
