"""Sample transforms and a fingerprint for a user's map-style data set."""

import os
import traceback
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from samewise.runner.data import streams
from samewise.runner.errors import (
    ConfigError,
    DataError,
    Problem,
    SamewiseError,
    describe_exit,
    raised_at,
    summarise_error,
)
from samewise.runner.interfaces import class_names, of_labels
from samewise.runner.records.digest import combine, entries, value_digest

_GEOMETRIC = ("torchvision.transforms.v2._geometry", "torchvision.transforms.v2._auto_augment")
"""Modules of torchvision's transforms that move pixels."""


class WithTransform(Dataset[Any]):
    """Data set with transforms, applied in the process that loads a sample.

    They get the sample's `image` (or its first element), or the whole sample if it has boxes.
    """

    def __init__(
        self, dataset: Any, transforms: Sequence[Callable[[Any], Any]], path: str = "transforms"
    ) -> None:
        self.inner = dataset
        self.transforms = tuple(transforms)
        self.path = path
        self._moving = next(
            (
                type(transform).__name__
                for transform in transforms
                if type(transform).__module__ in _GEOMETRIC
            ),
            "",
        )

    @staticmethod
    def of(
        dataset: Any, transforms: Sequence[Callable[[Any], Any]], path: str = "transforms"
    ) -> Any:
        """Add transforms, which stand at a path of the config.

        Without any, return the data set itself, so that its fast paths remain.
        """
        return WithTransform(dataset, transforms, path) if transforms else dataset

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        sample = self.inner[index]
        if isinstance(sample, Mapping):
            if "image" not in sample or _must_move_together(sample):
                return self._transform(sample)
            if self._moving:
                self._require_alone(sample)
            return {**sample, "image": self._transform(sample["image"])}
        return (self._transform(sample[0]), *sample[1:])

    def _require_alone(self, sample: Mapping[Any, Any]) -> None:
        """Raise a ConfigError if another entry, such as a mask, has the image's height and width.

        The transforms would move the image, and not the entry.
        """
        same_size = [
            str(name)
            for name, value in sample.items()
            if name != "image" and _size(value) == _size(sample["image"]) is not None
        ]
        if same_size:
            raise ConfigError(
                Problem(
                    "transforms",
                    f"{self._moving} would move the image but not {', '.join(same_size)}, of the "
                    "same size",
                    expected="masks that torchvision recognises and moves with the image",
                    hint="wrap both: tv_tensors.Image, tv_tensors.Mask",
                )
            )

    def _transform(self, value: Any) -> Any:
        return apply(self.transforms, value, self.path)


class Joined(ConcatDataset[Any]):
    """Several training sets as one, with the attributes that samewise reads from a data set.

    Args:
        parts: The data sets, by name: `train`, and any `train_NAME`.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__(parts.values())
        self.parts = parts
        self.classes = max((class_names(x) for x in self.datasets), key=len)
        self.category_ids = of_labels(self.datasets[0], "category_ids")
        self.encoded = any(getattr(x, "encoded", False) for x in self.datasets)

    def path(self, index: int) -> Any:
        """Return the file of a sample, from its set."""
        number = bisect_right(self.cumulative_sizes, index)
        part: Any = self.datasets[number]
        return part.path(index - [0, *self.cumulative_sizes][number])


class ByShard(Dataset[Any]):
    """Map-style view of a stream of known shards, of which each process keeps `window` in memory.

    All attributes but those of this class are the stream's.

    Args:
        stream: A data set with `shard_sizes`, the number of samples of each shard, and
            `read_shard(number)`, which returns an iterator over the samples of a shard.

    Raises:
        DataError: A shard has another number of samples.
    """

    def __init__(self, stream: Any) -> None:
        self.inner = stream
        self._ends = np.cumsum(stream.shard_sizes)
        self._kept = OrderedDict[int, list[Any]]()

    def __getattr__(self, name: str) -> Any:
        # Before `inner` is set, as in unpickling, there are no attributes
        return (
            getattr(vars(self)["inner"], name)
            if "inner" in vars(self)
            else super().__getattribute__(name)
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        shard = int(np.searchsorted(self._ends, index, "right"))
        if shard not in self._kept:
            # Which sample needs the shard first changes nothing
            with streams.scope(0, "shard", shard):
                samples = [*self.inner.read_shard(shard)]
            DataError.raise_if(
                len(samples) != self.inner.shard_sizes[shard],
                "dataset",
                f"{type(self.inner).__name__}.read_shard({shard}) has another number of samples than "
                f"shard_sizes[{shard}]",
                len(samples),
                str(self.inner.shard_sizes[shard]),
            )
            self._kept[shard] = samples
        self._kept.move_to_end(shard)
        while len(self._kept) > getattr(self.inner, "window", 16):
            self._kept.popitem(last=False)
        # Counted from the shard's end
        return self._kept[shard][index - self._ends[shard]]


def apply(transforms: Sequence[Callable[[Any], Any]], value: Any, path: str) -> Any:
    """Apply the transforms at a path of the config, in their order, to a sample or a batch."""
    # `failed_transform` reads this frame's variables to find the transform that raised an error.
    for transform in transforms:
        value = transform(value)
    return value


def failed_transform(error: BaseException) -> tuple[str, str] | None:
    """Return path and name of the transform that raised the error; None if none did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is apply.__code__:
            variables, failed = frame.f_locals, frame.f_locals["transform"]
            number = next(
                number
                for number, transform in enumerate(variables["transforms"])
                if transform is failed
            )
            return f"{variables['path']}.{number}", getattr(
                failed, "__name__", type(failed).__name__
            )
    return None


def _size(value: Any) -> tuple[int, ...] | None:
    """Return (height, width) of a tensor, an array or a Pillow image; None for anything else."""
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return (
            tuple(cast("tuple[int, ...]", shape)[-2:])
            if len(cast("tuple[int, ...]", shape)) > 1
            else None
        )
    size = getattr(value, "size", None)
    return size[::-1] if isinstance(size, tuple) else None  # pyright: ignore[reportUnknownVariableType]


def without_transforms(dataset: Any) -> Any:
    """Return the user's data set itself."""
    while isinstance(dataset, WithTransform | ByShard):
        dataset = dataset.inner
    return dataset


def sample_name(dataset: Any, index: int) -> str:
    """Name a sample in messages: `sample 17 (FILE)`.

    The file comes from the data set's method `path(index)`, or torchvision's `samples`.
    """
    inner = without_transforms(dataset)
    try:
        file = (
            inner.path(index) if callable(getattr(inner, "path", None)) else inner.samples[index][0]
        )
    # A data set has neither, or means something else by them.
    except Exception:
        file = None
    return f"sample {index} ({file})" if isinstance(file, str | os.PathLike) else f"sample {index}"


def differing_entry(sample: Any, repeated: Any) -> str | None:
    """Name the entry in which two samples, or batches, differ.

    Return `, image`, an empty string where entries have no names, or None if nothing differs.
    """
    if value_digest(sample) == value_digest(repeated):
        return None
    sample_entries, repeated_entries = entries(sample), entries(repeated)
    return next(
        (
            f", {name}"
            for name in sample_entries
            if name in repeated_entries
            and value_digest(sample_entries[name]) != value_digest(repeated_entries[name])
        ),
        "",
    )


def _must_move_together(sample: Mapping[Any, Any]) -> bool:
    """Return whether a sample has boxes, masks or points, which must move with its image."""
    # By name, so that samewise need not import torchvision
    kinds = (type(value) for value in sample.values())
    return any(
        kind.__module__.startswith("torchvision.tv_tensors")
        and kind.__name__ not in ("Image", "Video")
        for kind in kinds
    )


def failure(dataset: Any, name: str, place: str, error: Exception | SystemExit) -> Problem:
    """Describe an error in the code of a data set or of a transform.

    Args:
        dataset: The data set, with its transforms.
        name: Its path in the config.
        place: Sample or method in which it fails, for the message.
        error: Its error; the hint names the line of the user's code.
    """
    name, owner = failed_transform(error) or (name, type(without_transforms(dataset)).__name__)
    if isinstance(error, SystemExit):
        message, place_of_exit = describe_exit(owner, error)
        return Problem(name, message, hint=place_of_exit)
    return Problem(
        name,
        f"{owner} fails {place}: {type(error).__name__}: {summarise_error(error)}",
        hint=raised_at(error),
    )


def fingerprint(dataset: Any, name: str = "dataset") -> str:
    """Return the data set's own `fingerprint()`, or a digest of its length and nine samples.

    Raises:
        DataError: The method, or making a sample, failed.
    """
    if isinstance(dataset, Joined):
        parts = [fingerprint(part, f"dataset.{x}") for x, part in dataset.parts.items()]
        return f"{value_digest(parts):016x}"
    place = "in fingerprint()"
    try:
        if hasattr(dataset, "fingerprint"):
            return str(dataset.fingerprint())
        length = len(dataset)
        # Nine evenly spaced samples, each with seeds of its own
        with streams.preserve_generators():
            digests = [length]
            for part in range(9):
                index = part * (length - 1) // 8
                streams.enter(0, "fingerprint", part)
                place = f"at {sample_name(dataset, index)}"
                digests.append(value_digest(dataset[index]))
    except SamewiseError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(failure(dataset, name, place, error)) from error
    return f"{combine(digests):016x}"
