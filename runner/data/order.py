"""Orders of an epoch's samples: functions of (seed, epoch), so resuming replays nothing."""

import abc
from collections.abc import Sequence, Sized
from itertools import accumulate
from math import isqrt
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samewise.runner.data import streams
from samewise.runner.data.dataset import Joined
from samewise.runner.errors import (
    ConfigError,
    Problem,
    raised_at,
    require_at_least,
    summarise_error,
)

Indices = npt.NDArray[np.int64]


class Order(abc.ABC):
    """Order of the samples of each epoch. Every epoch has the same number of indices."""

    _held: tuple[int, Indices] | None = None

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of indices of an epoch."""

    @abc.abstractmethod
    def indices(self, epoch: int) -> Tensor:
        """Return int64[len(self)], the data set's indices in this epoch's order."""

    def at(self, epoch: int, positions: Indices) -> Indices:
        """Return int64[N], the indices at N positions of an epoch.

        This method holds the indices of one epoch. An order that computes an index from its
        position replaces it, and then needs no memory.
        """
        if self._held is None or self._held[0] != epoch:
            self._held = (epoch, self.indices(epoch).numpy())
        return self._held[1][positions]


class Checked(Order):
    """A user's order, each of whose results is checked.

    Args:
        order: The user's order. It must return int64[len(order)], indices of the data set, and the
            same ones whenever it is asked for an epoch.
        samples: Length of the data set.

    Raises:
        ConfigError: The first epoch's indices depend on anything but the epoch, or an epoch's
            indices have another dtype or length, or lie outside the data set.
    """

    def __init__(self, order: Order, *, samples: int) -> None:
        self._order, self._samples, self._length = order, samples, len(order)
        with streams.preserve_generators():
            samples_of_indices = list[Tensor]()
            # Equal for seeds 0 and 0 only: the order draws from a global generator. Never equal: it
            # has a state.
            for seed in (0, 1, 0):
                streams.enter(seed, "order")
                samples_of_indices.append(self.indices(0))
        if torch.equal(samples_of_indices[0], samples_of_indices[1]):
            return
        repeats = torch.equal(samples_of_indices[0], samples_of_indices[2])
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
            indices: Any = self._order.indices(epoch)
        except Exception as error:
            raise self._error(
                epoch,
                f"fails: {type(error).__name__}: {summarise_error(error)}",
                hint=raised_at(error),
            ) from error
        if fault := self._fault(indices):
            raise self._error(
                epoch,
                f"returns {fault}",
                expected=f"a tensor int64[{self._length}] of indices from 0 to {self._samples - 1}",
            )
        return indices

    def _fault(self, indices: Any) -> str:
        """Describe what is wrong with the indices; empty if nothing is."""
        if not isinstance(indices, Tensor):
            return f"a {type(indices).__name__}"
        dtype = indices.dtype
        if (
            indices.shape != (self._length,)
            or dtype.is_floating_point
            or dtype is torch.bool
            or not indices.is_cpu
        ):
            shape = list(indices.shape)
            return f"{str(dtype).removeprefix('torch.')}{shape} on {indices.device}"
        outside = indices[(indices < 0) | (indices >= self._samples)]
        return f"the index {outside[0]}" if len(outside) else ""

    def _error(
        self, epoch: int, message: str, *, expected: str = "", hint: str = ""
    ) -> ConfigError:
        return ConfigError(
            Problem(
                "loader.order",
                f"{type(self._order).__name__}.indices({epoch}) {message}",
                expected=expected,
                hint=hint,
            )
        )


class Truncated(Order):
    """The first indices of each epoch of another order."""

    def __init__(self, order: Order, most: int) -> None:
        self._order, self._length = order, min(most, len(order))

    def __len__(self) -> int:
        return self._length

    def indices(self, epoch: int) -> Tensor:
        return torch.from_numpy(self.at(epoch, np.arange(self._length)))

    def at(self, epoch: int, positions: Indices) -> Indices:
        return self._order.at(epoch, positions)


class InOrder(Order):
    """The data set's own order, every epoch."""

    def __init__(self, dataset: Sized, *, seed: int) -> None:
        self._length, self._seed = len(dataset), seed

    def __len__(self) -> int:
        return self._length

    def indices(self, epoch: int) -> Tensor:
        return torch.from_numpy(self.at(epoch, np.arange(self._length)))

    def at(self, epoch: int, positions: Indices) -> Indices:
        return positions


class Shuffled(Order):
    """Permutation of the data set, keyed by (seed, epoch)."""

    def __init__(self, dataset: Sized, *, seed: int) -> None:
        self._length, self._seed = len(dataset), seed

    def __len__(self) -> int:
        return self._length

    def indices(self, epoch: int) -> Tensor:
        return torch.randperm(self._length, generator=streams.generator(self._seed, "order", epoch))


class Bijection(InOrder):
    """Permutation of the data set, keyed by (seed, epoch), that takes no memory.

    An index is computed from its position alone, by a Feistel network: the position is split into
    row and column of the smallest near-square that holds the data set, and in each round a hash of
    one moves the other. Results outside the data set go through the network again, which keeps it
    a bijection (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", 3.3 and 4).
    """

    _ROUNDS = 8

    def at(self, epoch: int, positions: Indices) -> Indices:
        columns = isqrt(self._length - 1) + 1
        rows = -(-self._length // columns)
        keys = [
            np.uint64(streams.key(self._seed, "order", epoch, number))
            for number in range(self._ROUNDS)
        ]
        indices, outside = positions.astype(np.uint64), np.arange(len(positions))
        while len(outside):
            row, column = np.divmod(indices[outside], np.uint64(columns))
            for number, key in enumerate(keys):
                # The remainder before the sum: a sum that wraps at 2**64 would not be invertible
                if number % 2:
                    column = (column + _hash(row, key) % np.uint64(columns)) % np.uint64(columns)
                else:
                    row = (row + _hash(column, key) % np.uint64(rows)) % np.uint64(rows)
            indices[outside] = row * np.uint64(columns) + column
            outside = outside[indices[outside] >= self._length]
        return indices.astype(np.int64)


def _hash(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Mix uint64[N] with a key: the finaliser of SplitMix64 (Steele et al. 2014, variant 13)."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Windowed(InOrder):
    """Permutation of samples in shards, keyed by (seed, epoch), of few shards at a time.

    The shards come in the order of a `Bijection`, and the samples of so many neighbours in that
    order as `window` says in the order of another. So each batch needs the samples of at most
    `window` shards, or of twice as many if it ends one window and begins the next. A position is
    found by arithmetic on the shards' sizes, which alone are in memory.

    Args:
        dataset: Data set whose attribute `shard_sizes` has the number of samples of each shard, in
            the order of the data set's indices; `window`, or 16, is the number of shards to mix.
        seed: The experiment's `seed`.

    Raises:
        ConfigError: The sizes do not add up to the data set's length, or the window is below 1.
    """

    def __init__(self, dataset: Sized, *, seed: int) -> None:
        super().__init__(dataset, seed=seed)
        described: Any = dataset
        self._sizes = np.asarray(described.shard_sizes, dtype=np.int64)
        self._window = int(getattr(dataset, "window", 16))
        require_at_least({"dataset.window": self._window})
        if self._sizes.sum() != self._length:
            reason = f"{type(dataset).__name__}.shard_sizes do not add up to its length"
            expected = f"{self._length}, the length"
            raise ConfigError(Problem("dataset", reason, int(self._sizes.sum()), expected))
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._shards = Bijection(self._sizes, seed=streams.key(seed, "shards") >> 1)
        self._drawn: tuple[int, Indices, Indices] | None = None

    def at(self, epoch: int, positions: Indices) -> Indices:
        if self._drawn is None or self._drawn[0] != epoch:
            shards = self._shards.at(epoch, np.arange(len(self._sizes)))
            self._drawn = epoch, shards, np.cumsum(self._sizes[shards])
        _, shards, ends = self._drawn
        stops = np.append(ends[self._window - 1 : -1 : self._window], ends[-1])
        places, windows = np.empty_like(positions), np.searchsorted(stops, positions, "right")
        for window in np.unique(windows).tolist():
            start = int(stops[window - 1]) if window else 0
            inside = windows == window
            mixed = Bijection(
                range(start, int(stops[window])),
                seed=streams.key(self._seed, "window", window) >> 1,
            )
            places[inside] = start + mixed.at(epoch, positions[inside] - start)
        slots = np.searchsorted(ends, places, "right")
        chosen = shards[slots]
        return self._starts[chosen] + places - (ends[slots] - self._sizes[chosen])


class Interleaved(InOrder):
    """Several data sets in each epoch, every one in its own order: `Windowed` in shards, or `Bijection`.

    Each `BLOCK` positions have every set's share, at places that a `Bijection` draws. A set goes on
    in an epoch where it was at the end of the one before, pass after pass. So its samples repeat
    when all have come, and not before; and no more of its shards are needed at a time than if it
    were alone.

    Args:
        dataset: The training sets: a data set with `parts`, data sets by name.
        seed: The experiment's `seed`.
    """

    BLOCK = 1024

    def __init__(self, dataset: Any, *, seed: int) -> None:
        super().__init__(dataset, seed=seed)
        parts = dataset.parts.values()
        self._firsts = [0, *accumulate(map(len, parts))]
        self._orders = [
            (Windowed if hasattr(part, "shard_sizes") else Bijection)(
                part, seed=streams.key(seed, "set", number) >> 1
            )
            for number, part in enumerate(parts)
        ]
        self._starts = [[0] * len(parts)]

    def counts(self, epoch: int) -> list[int]:
        """Return how many samples of each set an epoch has: all of them.

        A subclass for a curriculum returns other counts for each epoch, of the same sum.
        """
        return [*map(len, self._orders)]

    def at(self, epoch: int, positions: Indices) -> Indices:
        while len(self._starts) <= epoch:
            earlier = self.counts(len(self._starts) - 1)
            self._starts.append([x + y for x, y in zip(self._starts[-1], earlier, strict=True)])
        counts, blocks = self.counts(epoch), positions // self.BLOCK
        numbers, places, indices = (np.empty_like(positions) for _ in range(3))
        for block in np.unique(blocks).tolist():
            inside, first = blocks == block, block * self.BLOCK
            size = min(self.BLOCK, self._length - first)
            before, after = _divide(first, counts), _divide(first + size, counts)
            turns = Bijection(range(size), seed=streams.key(self._seed, "block", block) >> 1)
            set_numbers = np.repeat(np.arange(len(counts)), np.subtract(after, before))
            set_numbers = set_numbers[turns.at(epoch, np.arange(size))]
            of_set = np.empty_like(set_numbers)
            # A set's samples keep its order
            of_set[np.argsort(set_numbers, kind="stable")] = np.concatenate(
                [*map(np.arange, before, after)]
            )
            numbers[inside] = set_numbers[positions[inside] - first]
            places[inside] = of_set[positions[inside] - first]
        for number in np.unique(numbers).tolist():
            order, chosen = self._orders[number], numbers == number
            passes, of_pass = np.divmod(places + self._starts[epoch][number], len(order))
            for each in np.unique(passes[chosen]).tolist():
                now = chosen & (passes == each)
                indices[now] = self._firsts[number] + order.at(each, of_pass[now])
        return indices


def _divide(stop: int, counts: Sequence[int]) -> list[int]:
    """Return how many of the first `stop` of sum(counts) places are each set's.

    Each has its share within the number of sets, never fewer at a later stop, and all its counts at
    the end.
    """
    rest, shares = sum(counts), list[int]()
    for count in counts:
        shares.append(stop * count // max(rest, 1))
        stop, rest = stop - shares[-1], rest - count
    return shares


LARGEST_PERMUTATION = 10_000_000
"""Samples above which `Bijection` is the default: a permutation takes 8 bytes and 70 ns each."""


def shuffled(dataset: Sized, *, seed: int) -> Order:
    """Make the default order of training.

    It is `Windowed` for a data set in shards, `Interleaved` for several of which one is in shards,
    else `Shuffled`, or `Bijection` for a large one.
    """
    if hasattr(dataset, "shard_sizes"):
        return Windowed(dataset, seed=seed)
    if isinstance(dataset, Joined) and any(hasattr(x, "shard_sizes") for x in dataset.datasets):
        return Interleaved(dataset, seed=seed)
    kind = Bijection if len(dataset) > LARGEST_PERMUTATION else Shuffled
    return kind(dataset, seed=seed)


class First(InOrder):
    """The data set's first samples, every epoch (debug=overfit).

    A working model can fit them perfectly.

    Args:
        dataset: The data set.
        seed: The experiment's `seed`; unused.
        samples: Number of samples.
    """

    def __init__(self, dataset: Sized, *, seed: int, samples: int) -> None:
        super().__init__(dataset, seed=seed)
        require_at_least({"loader.order.samples": samples})
        self._length = min(samples, len(dataset))


class ByReplica(InOrder):
    """Default order of training, cut into one section for each replica (`order=by_replica`).

    In each batch, a replica's samples are the next ones of its section. So a process needs only the
    shards of its replicas' sections, and a batch has samples of a window of shards for each replica.
    The samples of an epoch's last, smaller batch are the order's last ones.

    Args:
        dataset: The data set.
        seed: The experiment's `seed`.
        batch_size: Samples of a step.
        replicas: Replicas among which a step's samples are split.

    Raises:
        ConfigError: The replicas do not divide the batch.
    """

    def __init__(self, dataset: Sized, *, seed: int, batch_size: int, replicas: int) -> None:
        super().__init__(dataset, seed=seed)
        ConfigError.raise_if(
            batch_size % replicas,
            "batch_size",
            f"cannot be divided among {replicas} replicas, as order=by_replica needs",
            batch_size,
        )
        self._shuffled, self._share = shuffled(dataset, seed=seed), batch_size // replicas
        self._batch_size, self._steps = batch_size, self._length // batch_size

    def at(self, epoch: int, positions: Indices) -> Indices:
        step, place = np.divmod(positions, self._batch_size)
        replica, number = np.divmod(place, self._share)
        of_section = (replica * self._steps + step) * self._share + number
        return self._shuffled.at(epoch, np.where(step < self._steps, of_section, positions))


class RepeatedAugmentation(InOrder):
    """Each sample several times per batch, differently transformed (Hoffer et al. 2020).

    arXiv 1901.09335. As in the reference's sampler (pytorch/vision, references/classification,
    `RASampler`), an epoch is as long as the data set, cut to whole blocks of 256. It therefore sees
    a quarter of the samples when `repeats` is 4. In whole batches the copies of a sample go to
    different replicas.

    Args:
        dataset: The data set.
        seed: The experiment's `seed`.
        repeats: Number of copies of each sample.
        batch_size: Samples of a step.
        replicas: Replicas among which a step's samples are split.
    """

    def __init__(
        self, dataset: Sized, *, seed: int, repeats: int, batch_size: int, replicas: int
    ) -> None:
        require_at_least({"loader.order.repeats": repeats})
        super().__init__(dataset, seed=seed)
        self._shuffled = shuffled(dataset, seed=seed)
        self.repeats = repeats
        self._batch_size = batch_size
        self._replicas = replicas
        self._length = len(dataset) // 256 * 256 or len(dataset)

    def at(self, epoch: int, positions: Indices) -> Indices:
        # Neighbours go to different replicas: within a batch, replica r takes the samples r, r +
        # replicas, r + 2 replicas, ...
        batch, place = np.divmod(positions, self._batch_size)
        replica, number = np.divmod(place, self._batch_size // self._replicas)
        spread = batch * self._batch_size + number * self._replicas + replica
        stop = self._length // self._batch_size * self._batch_size
        copies = np.where(positions < stop, spread, positions)
        return self._shuffled.at(epoch, copies // self.repeats)
