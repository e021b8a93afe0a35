"""Orders by weights: of the samples of a data set, or of several data sets."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import floor, inf, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samewise.runner.data import streams
from samewise.runner.data.order import Bijection, Indices, InOrder, Order
from samewise.runner.errors import ConfigError, first_few
from samewise.runner.interfaces import class_names


class Weighted(Order):
    """Samples drawn with replacement, as by torch's `WeightedRandomSampler` (`order=weighted`).

    Args:
        dataset: The data set. Classes are read from its `labels` or `targets`; without these, from
            each of its samples, once.
        seed: The experiment's `seed`.
        weights: "balanced": each class is drawn equally often. A mapping: how often each class is
            drawn, relative to the others. Another text: the data set's attribute or method of that
            name, with a weight for each sample.
        samples: Samples of an epoch; None: as many as the data set has.

    Raises:
        ConfigError: The weights are not those of the classes, or of the samples.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        weights: str | Mapping[str, float] = "balanced",
        samples: int | None = None,
    ) -> None:
        self._seed, self._length = seed, len(dataset) if samples is None else samples
        if isinstance(weights, str) and weights != "balanced":
            values: Any = getattr(dataset, weights, ())
            expected = f"balanced, or the name of {len(dataset)} numbers in the data set"
            values = values() if callable(values) else values
            self._weights = _numbers(values, weights, len(dataset), expected)
            return
        labels = _labels(dataset)
        counts = labels.bincount()
        names = class_names(dataset) or [*map(str, range(len(counts)))]
        shares = _shares(dict.fromkeys(names, 1) if weights == "balanced" else weights, names)
        self._weights = (shares[: len(counts)] / counts)[labels]

    def __len__(self) -> int:
        return self._length

    def indices(self, epoch: int) -> Tensor:
        return torch.multinomial(
            self._weights,
            self._length,
            replacement=True,
            generator=streams.generator(self._seed, "order", epoch),
        )


class Mixed(InOrder):
    """Several data sets mixed by weights, computed from the position alone (`order=mixed`).

    What a set gives to an epoch follows what it gave to earlier ones, through a permutation of the
    set for each of its passes. So its samples repeat when all have come, and not before. Within an
    epoch the sets are shuffled together.

    Args:
        dataset: The training sets: a data set with `parts`, data sets by name.
        seed: The experiment's `seed`.
        weights: How many samples of each set come, relative to the others.
        samples: Samples of an epoch; None: as many as the sets have.

    Raises:
        ConfigError: The weights are not those of the sets.
    """

    def __init__(
        self, dataset: Any, *, seed: int, weights: Mapping[str, float], samples: int | None = None
    ) -> None:
        super().__init__(dataset, seed=seed)
        self._length = self._length if samples is None else samples
        parts = getattr(dataset, "parts", {})
        self._bounds = [*accumulate(_shares(weights, [*parts]).tolist())]
        self._firsts = [0, *accumulate(map(len, parts.values()))]
        self._orders = [
            Bijection(part, seed=streams.key(seed, "set", number) >> 1)
            for number, part in enumerate(parts.values())
        ]
        self._places = Bijection(range(self._length), seed=seed)
        self._starts = [[0] * len(parts)]

    def counts(self, epoch: int) -> list[int]:
        """Return how many samples of each set an epoch has: its share, rounded up or down.

        A subclass for a curriculum returns other counts for each epoch, of the same sum.
        """
        # Multiples of the golden ratio are spread evenly over [0, 1): over the epochs, a set is
        # rounded up as often as its share says
        offset = epoch * (sqrt(5) - 1) / 2 % 1
        ends = [floor(bound / self._bounds[-1] * self._length + offset) for bound in self._bounds]
        return [stop - start for start, stop in zip([0, *ends], ends, strict=False)]

    def at(self, epoch: int, positions: Indices) -> Indices:
        counts, indices = self.counts(epoch), np.empty_like(positions)
        while len(self._starts) <= epoch:
            earlier = self.counts(len(self._starts) - 1)
            self._starts.append([x + y for x, y in zip(self._starts[-1], earlier, strict=True)])
        places, ends = self._places.at(epoch, positions), np.cumsum(counts)
        numbers = np.searchsorted(ends, places, side="right")
        for number, order in enumerate(self._orders):
            start = self._starts[epoch][number] + counts[number] - ends[number]
            passes, of_set = np.divmod(places + start, len(order))
            for of_pass in np.unique(passes[numbers == number]):
                chosen = (numbers == number) & (passes == of_pass)
                indices[chosen] = self._firsts[number] + order.at(int(of_pass), of_set[chosen])
        return indices


def _shares(weights: Any, names: Sequence[str]) -> Tensor:
    """Return a weight for each name, float64[names]."""
    fits = isinstance(weights, Mapping) and {*weights} == {*names}
    expected = first_few(names, 20) or "several training sets: dataset.train, dataset.train_NAME"
    values = [weights[name] for name in names] if fits else ()
    return _numbers(values, weights, len(names), f"a number for each of {expected}")


def _numbers(values: Iterable[Any], weights: Any, count: int, expected: str) -> Tensor:
    """Return so many weights, float64[count], of which one is not 0."""
    numbers = torch.tensor([*map(float, values)], dtype=torch.float64)
    # NaN compares as false
    ConfigError.raise_if(
        len(numbers) != count or not (numbers >= 0).all() or not 0 < numbers.sum() < inf,
        "loader.order.weights",
        "are not weights",
        weights,
        expected,
    )
    return numbers


def _labels(dataset: Any) -> Tensor:
    """Return the labels of a data set's samples, int64[N]."""
    for name in ("labels", "targets"):
        if (labels := getattr(dataset, name, None)) is not None:
            return torch.as_tensor(labels)
    if parts := getattr(dataset, "parts", None):
        return torch.cat([*map(_labels, parts.values())])
    samples = (dataset[index] for index in range(len(dataset)))
    return torch.tensor([x["label"] if isinstance(x, Mapping) else x[1] for x in samples])
