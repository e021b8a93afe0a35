"""Generated samples, each with its own random generator: a sample is a function of its number."""

import abc
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from samewise.runner.errors import require_at_least


def generator_of(key: str) -> torch.Generator:
    """Return a CPU generator seeded by a hash of the key."""
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little"))
    return generator


class Generated(Dataset[dict[str, Any]], abc.ABC):
    """Samples that `make` generates.

    Args:
        length: Number of samples.
        key: Seeds the generators, together with a sample's number.

    Raises:
        ConfigError: `length` is less than 1.
    """

    def __init__(self, length: int, key: str) -> None:
        require_at_least({"dataset.length": length})
        self._length, self._key = length, key

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self.make(index, generator_of(f"{self._key} {index}"))

    @abc.abstractmethod
    def make(self, index: int, draw: torch.Generator) -> dict[str, Any]:
        """Generate a sample by its number; all randomness comes from `draw`."""


def triangle_wave(phase: Tensor, *, ticks: int, amplitude: int) -> Tensor:
    """Return int64 from -amplitude to amplitude, for a phase with `ticks` per period."""
    return ((phase % ticks - ticks // 2).abs() - ticks // 4) * amplitude // (ticks // 4)
