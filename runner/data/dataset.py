"""Adds sample transforms and a fingerprint of the data to a user's map-style data set."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import Dataset

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
from samewise.runner.records.digest import combine, entries, value_digest

_GEOMETRIC = ("torchvision.transforms.v2._geometry", "torchvision.transforms.v2._auto_augment")
"""The modules of torchvision's transforms that move pixels."""


class WithTransform(Dataset[Any]):
    """Applies transforms to a data set's samples, in the process that loads them: to `image` (or
    the first element), or to the whole sample if it has boxes.
    """

    def __init__(
        self, dataset: Any, transforms: Sequence[Callable[[Any], Any]], path: str = "transforms"
    ) -> None:
        self.inner = dataset
        self.transforms = tuple(transforms)
        self.path = path
        self._moving = next(
            (type(one).__name__ for one in transforms if type(one).__module__ in _GEOMETRIC), ""
        )

    @staticmethod
    def of(
        dataset: Any, transforms: Sequence[Callable[[Any], Any]], path: str = "transforms"
    ) -> Any:
        """The data set with the transforms at a config's path.

        The data set itself if there are none, so that its fast paths remain.
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
        """Raise a ConfigError if something else in a sample, such as a mask, is as high and wide as
        its image: it would stay where it is.
        """
        others = [
            str(name)
            for name, value in sample.items()
            if name != "image" and _size(value) == _size(sample["image"]) is not None
        ]
        if others:
            words, hint = (
                f"{self._moving} would move the image but not {', '.join(others)}, of the "
                "same size",
                "wrap both: tv_tensors.Image, tv_tensors.Mask",
            )
            raise ConfigError(
                Problem(
                    "transforms",
                    words,
                    expected="masks that torchvision recognises and moves with the image",
                    hint=hint,
                )
            )

    def _transform(self, value: Any) -> Any:
        return apply(self.transforms, value, self.path)


def apply(transforms: Sequence[Callable[[Any], Any]], value: Any, path: str) -> Any:
    """What the transforms at a config's path, in their order, make of a sample or a batch.

    `failed_transform` finds the one that fails.
    """
    for transform in transforms:
        value = transform(value)
    return value


def failed_transform(error: BaseException) -> tuple[str, str] | None:
    """The path and the name of the transform that raised the error; None if none did."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is apply.__code__:
            at, failed = frame.f_locals, frame.f_locals["transform"]
            number = next(number for number, one in enumerate(at["transforms"]) if one is failed)
            return f"{at['path']}.{number}", getattr(failed, "__name__", type(failed).__name__)
    return None


def _size(value: Any) -> tuple[int, ...] | None:
    """(height, width) of a tensor, an array or a Pillow image; None of anything else."""
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return (
            tuple(cast("tuple[int, ...]", shape)[-2:])
            if len(cast("tuple[int, ...]", shape)) > 1
            else None
        )
    size = getattr(value, "size", None)
    return size[::-1] if isinstance(size, tuple) else None  # pyright: ignore[reportUnknownVariableType]


def without_transforms(dataset: Any) -> Any:
    """The user's data set itself."""
    return dataset.inner if isinstance(dataset, WithTransform) else dataset


def sample_name(dataset: Any, index: int) -> str:
    """How messages refer to a sample: `sample 17`, with its file if the data set has a method
    `path(index)` or torchvision's `samples`.
    """
    inner = without_transforms(dataset)
    try:
        file = (
            inner.path(index) if callable(getattr(inner, "path", None)) else inner.samples[index][0]
        )
    except Exception:  # it has neither, or they mean something else
        file = None
    return f"sample {index} ({file})" if isinstance(file, str | os.PathLike) else f"sample {index}"


def differing_entry(one: Any, two: Any) -> str | None:
    """The entry in which two samples, or batches, differ: `, image`, empty if there are no names,
    None if nothing differs.
    """
    if value_digest(one) == value_digest(two):
        return None
    first, second = entries(one), entries(two)
    return next(
        (
            f", {name}"
            for name in first
            if name in second and value_digest(first[name]) != value_digest(second[name])
        ),
        "",
    )


def _must_move_together(sample: Mapping[Any, Any]) -> bool:
    """Whether the sample has torchvision tv_tensors that must be transformed with the image: boxes,
    masks or points. Does not import torchvision.
    """
    kinds = (type(value) for value in sample.values())
    return any(
        kind.__module__.startswith("torchvision.tv_tensors")
        and kind.__name__ not in ("Image", "Video")
        for kind in kinds
    )


def failure(dataset: Any, name: str, at: str, error: Exception | SystemExit) -> Problem:
    """The problem for an error in the code of a data set, which has a `name` in the config, or of a
    transform: at which sample, and the user's line.
    """
    name, who = failed_transform(error) or (name, type(without_transforms(dataset)).__name__)
    if isinstance(error, SystemExit):
        message, where = describe_exit(who, error)
        return Problem(name, message, hint=where)
    return Problem(
        name,
        f"{who} fails {at}: {type(error).__name__}: {summarise_error(error)}",
        hint=raised_at(error),
    )


def fingerprint(dataset: Any, name: str = "dataset") -> str:
    """The data set's own `fingerprint()`.

    Otherwise a digest of its length and of nine evenly spaced samples; DataError if it or a sample
    cannot be made.
    """
    at = "in fingerprint()"
    try:
        if hasattr(dataset, "fingerprint"):
            return str(dataset.fingerprint())
        length = len(dataset)
        with streams.preserve_generators():
            numbers = [length]
            for part in range(9):
                index = part * (length - 1) // 8
                streams.enter(0, "fingerprint", part)
                at = f"at {sample_name(dataset, index)}"
                numbers.append(value_digest(dataset[index]))
    except SamewiseError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(failure(dataset, name, at, error)) from error
    return f"{combine(numbers):016x}"
