"""Base of data sets of numbers in memory: columns to learn from, and targets."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

from samewise.runner.interfaces import Batch


class NumberRows(Dataset[dict[str, Any]], abc.ABC):
    """Samples `{"features": float32[F], "label": float32[T]}` from tensors of N rows.

    Args:
        classes: The targets' names.
        columns: float32[N, F] `features`, float32[N, T] `label`, and any further tensors [N, ...].
    """

    def __init__(self, classes: Sequence[str], **columns: Tensor) -> None:
        self.classes, self.columns = list(classes), columns

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.columns.items()}

    @property
    def batch(self) -> Callable[[Sequence[int]], Batch]:
        """Function that fetches many samples at once, collated."""
        return lambda indices: {
            name: values[torch.as_tensor(indices)] for name, values in self.columns.items()
        }

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover every number, and the targets' names."""
        digest = xxhash.xxh3_128(repr(self.classes).encode())
        for values in self.columns.values():
            digest.update(values.numpy())
        return digest.hexdigest()
