"""The order of an epoch's samples as a function of (seed, epoch), so that resuming does not replay
earlier samples.
"""

from __future__ import annotations

import abc
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from samewise.runner.data import streams
from samewise.runner.errors import (
    ConfigError,
    Problem,
    raised_at,
    require_at_least,
    summarise_error,
)


class Order(abc.ABC):
    """Gives the indices of each epoch. Every epoch has the same number of them."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of indices in an epoch."""

    @abc.abstractmethod
    def indices(self, epoch: int) -> Tensor:
        """int64[len(self)]: the data set's indices in this epoch's order."""


class Checked(Order):
    """A user's order, whose indices are looked at: int64[len(order)] within the data set, the same
    whenever an epoch's are asked for.

    Raises: ConfigError: the first epoch's indices depend on something else than the epoch, or an
        epoch's are wrong.
    """

    def __init__(self, order: Order, *, samples: int) -> None:
        self._order, self._samples, self._length = order, samples, len(order)
        with streams.preserve_generators():
            found = list[Tensor]()
            for seed in (0, 1, 0):
                streams.enter(seed, "order")
                found.append(self.indices(0))
        if torch.equal(found[0], found[1]):
            return
        repeats = torch.equal(found[0], found[2])
        why = "draws from a global generator" if repeats else "depends on how often it is called"
        hint = 'draw with samewise.runner.data.streams.generator(seed, "NAME", epoch)'
        raise self._error(
            0,
            f"{why}: twice for the same epoch, it returns other indices",
            expected="indices that depend only on the seed and the epoch",
            hint=hint,
        )

    def __len__(self) -> int:
        return self._length

    def indices(self, epoch: int) -> Tensor:
        try:
            found: Any = self._order.indices(epoch)
        except Exception as error:
            raise self._error(
                epoch,
                f"fails: {type(error).__name__}: {summarise_error(error)}",
                hint=raised_at(error),
            ) from error
        if fault := self._fault(found):
            raise self._error(
                epoch,
                f"returns {fault}",
                expected=f"a tensor int64[{self._length}] of indices from 0 to {self._samples - 1}",
            )
        return found

    def _fault(self, found: Any) -> str:
        """What is wrong with indices; empty if nothing is."""
        if not isinstance(found, Tensor):
            return f"a {type(found).__name__}"
        if (
            found.shape != (self._length,)
            or found.dtype.is_floating_point
            or found.dtype is torch.bool
            or not found.is_cpu
        ):
            return f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)} on {found.device}"
        odd = found[(found < 0) | (found >= self._samples)]
        return f"the index {odd[0]}" if len(odd) else ""

    def _error(self, epoch: int, words: str, *, expected: str = "", hint: str = "") -> ConfigError:
        return ConfigError(
            Problem(
                "loader.order",
                f"{type(self._order).__name__}.indices({epoch}) {words}",
                expected=expected,
                hint=hint,
            )
        )


class InOrder(Order):
    """The data set's own order, every epoch."""

    def __init__(self, dataset: Sized, *, seed: int) -> None:
        self._length, self._seed = len(dataset), seed

    def __len__(self) -> int:
        return self._length

    def indices(self, epoch: int) -> Tensor:
        return torch.arange(self._length)


class Shuffled(InOrder):
    """A permutation of the data set, keyed by (seed, epoch)."""

    def indices(self, epoch: int) -> Tensor:
        return torch.randperm(self._length, generator=streams.generator(self._seed, "order", epoch))


class First(InOrder):
    """Only the data set's first samples, in every epoch: a working model can fit them perfectly
    (debug=overfit).

    Args:
        samples: How many.
    """

    def __init__(self, dataset: Sized, *, seed: int, samples: int) -> None:
        super().__init__(dataset, seed=seed)
        require_at_least({"loader.order.samples": samples})
        self._length = min(samples, len(dataset))


class RepeatedAugmentation(Order):
    """Each sample several times per batch, in different random versions (Hoffer et al. 2020, arXiv
    1901.09335).

    As the reference's sampler (pytorch/vision, references/classification, `RASampler`), an epoch is
    as long as the data set, cut to whole blocks of 256, so it sees a quarter of the samples when
    `repeats` is 4; and in whole batches the copies of a sample go to different replicas.

    Args:
        repeats: How often each sample comes.
        batch_size: Samples of a step.
        replicas: Replicas among which a step's samples are split.
    """

    def __init__(
        self, dataset: Sized, *, seed: int, repeats: int, batch_size: int, replicas: int
    ) -> None:
        require_at_least({"loader.order.repeats": repeats})
        self._shuffled = Shuffled(dataset, seed=seed)
        self.repeats = repeats
        self._batch_size = batch_size
        self._replicas = replicas
        self._length = len(dataset) // 256 * 256 or len(dataset)

    def __len__(self) -> int:
        return self._length

    def indices(self, epoch: int) -> Tensor:
        repeated = self._shuffled.indices(epoch).repeat_interleave(self.repeats)[: self._length]
        whole = len(repeated) // self._batch_size * self._batch_size
        # Neighbours go to different replicas: within a batch, replica r takes the samples r, r +
        # replicas, r + 2 replicas, ...
        spread = (
            repeated[:whole]
            .view(-1, self._batch_size // self._replicas, self._replicas)
            .transpose(1, 2)
            .reshape(-1)
        )
        return torch.cat([spread, repeated[whole:]])
