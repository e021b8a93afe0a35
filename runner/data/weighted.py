"""Orders by weights: of the samples of a data set, or of several data sets."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import floor, inf, sqrt
from typing import Any

import torch
from torch import Tensor

from samewise.runner.data import streams
from samewise.runner.data.order import Interleaved, Order
from samewise.runner.errors import ConfigError, first_few, nearest
from samewise.runner.interfaces import class_names

_MOST_WEIGHTS = 2**24
"""Most that `torch.multinomial` accepts."""


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
        ConfigError.raise_if(
            len(dataset) > _MOST_WEIGHTS,
            "loader.order",
            f"draws from at most {_MOST_WEIGHTS:,} samples",
            len(dataset),
            hint="order=mixed draws from data sets by weights, of any size",
        )
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


class Mixed(Interleaved):
    """Several data sets mixed by weights (`order=mixed`).

    Args:
        dataset: The training sets: a data set with `parts`, data sets by name.
        seed: The experiment's `seed`.
        weights: How many samples of each set come, relative to the others: a number, or one for each
            epoch, of which the last stays.
        samples: Samples of an epoch; None: as many as the sets have.

    Raises:
        ConfigError: The weights are not those of the sets.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        weights: Mapping[str, float | Sequence[float]],
        samples: int | None = None,
    ) -> None:
        names = [*getattr(dataset, "parts", {})]
        _shares(weights, names)
        epochs = max([1, *(len(x) for x in weights.values() if isinstance(x, Sequence))])
        self._bounds = [
            [*accumulate(_shares(weights, names, epoch=epoch).tolist())] for epoch in range(epochs)
        ]
        super().__init__(dataset, seed=seed)
        self._length = self._length if samples is None else samples

    def counts(self, epoch: int) -> list[int]:
        """Return how many samples of each set an epoch has: its share, rounded up or down.

        A subclass for a curriculum returns other counts for each epoch, of the same sum.
        """
        bounds = self._bounds[min(epoch, len(self._bounds) - 1)]
        # Multiples of the golden ratio are spread evenly over [0, 1): over the epochs, a set is
        # rounded up as often as its share says
        offset = epoch * (sqrt(5) - 1) / 2 % 1
        ends = [floor(bound / bounds[-1] * self._length + offset) for bound in bounds]
        return [stop - start for start, stop in zip([0, *ends], ends, strict=False)]


class Repeated(Interleaved):
    """Several data sets, each so many times in an epoch (`order=repeated`).

    Args:
        dataset: The training sets: a data set with `parts`, data sets by name.
        seed: The experiment's `seed`.
        repeats: How many times each set comes; 0.5: every second epoch has the other half.

    Raises:
        ConfigError: The repeats are not those of the sets.
    """

    def __init__(self, dataset: Any, *, seed: int, repeats: Mapping[str, float]) -> None:
        parts = getattr(dataset, "parts", {})
        times = _shares(repeats, [*parts], "repeats").tolist()
        super().__init__(dataset, seed=seed)
        self._counts = [round(x * len(y)) for x, y in zip(times, parts.values(), strict=True)]
        self._length = sum(self._counts)

    def counts(self, epoch: int) -> list[int]:
        return self._counts


def _shares(
    weights: Any, names: Sequence[str], setting: str = "weights", *, epoch: int = 0
) -> Tensor:
    """Return a weight for each name in an epoch, float64[names]."""
    pairs = weights if isinstance(weights, Mapping) else {}
    expected = first_few(names, 20) or "several training sets: dataset.train, dataset.train_NAME"
    stages = [weights[name] for name in names] if {*pairs} == {*names} else ()
    values = [x[min(epoch, len(x) - 1)] if isinstance(x, Sequence) else x for x in stages]
    return _numbers(
        values,
        weights,
        len(names),
        f"a number for each of {expected}",
        setting,
        next((f"{x}: {nearest(x, names)}" for x in pairs if names and x not in names), ""),
    )


def _numbers(
    values: Iterable[Any],
    weights: Any,
    count: int,
    expected: str,
    setting: str = "weights",
    hint: str = "",
) -> Tensor:
    """Return so many weights, float64[count], of which one is not 0."""
    numbers = torch.tensor([*map(float, values)], dtype=torch.float64)
    # NaN compares as false
    ConfigError.raise_if(
        len(numbers) != count or not (numbers >= 0).all() or not 0 < numbers.sum() < inf,
        f"loader.order.{setting}",
        "are not weights",
        weights,
        expected,
        hint,
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
