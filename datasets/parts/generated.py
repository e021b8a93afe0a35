"""Samples that are made rather than read: each by a generator of its own, so that a sample is a function of its number."""

from __future__ import annotations

import abc
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from samewise.runner.errors import require_positive


def generator_of(key: str) -> torch.Generator:
    """A generator whose seed is a hash of the key."""
    made = torch.Generator()
    made.manual_seed(int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little"))
    return made


class Generated(Dataset[dict[str, Any]], abc.ABC):
    """So many samples, each made by `make`.

    Args:
        length: How many.
        key: What the generators are seeded by, with the sample's number.
    """

    def __init__(self, length: int, key: str) -> None:
        require_positive({"dataset.length": length})
        self._length, self._key = length, key

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self.make(index, generator_of(f"{self._key} {index}"))

    @abc.abstractmethod
    def make(self, index: int, draw: torch.Generator) -> dict[str, Any]:
        """The sample with this number, all that is random in it drawn from `draw`."""


def triangle_wave(phase: Tensor, *, ticks: int, amplitude: int) -> Tensor:
    """int64, from -amplitude to amplitude, of a phase that is counted in `ticks` a period."""
    return ((phase % ticks - ticks // 2).abs() - ticks // 4) * amplitude // (ticks // 4)
