"""Bases of data sets that are in memory: columns of numbers, and images with labels."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

from samewise.runner.interfaces import Batch

Transform = Callable[[Tensor], Any]
"""Takes a sample's image, uint8[C, H, W], and returns an image.

Every transform of torchvision.transforms.v2 qualifies.
"""


class NumberRows(Dataset[dict[str, Any]]):
    """Samples `{"features": float32[F], "label": float32[T]}` from tensors of N rows.

    Args:
        classes: The targets' names.
        columns: float32[N, F] `features`, float32[N, T] `label`, and any further tensors [N, ...].
    """

    def __init__(self, classes: Sequence[str], **columns: Tensor) -> None:
        self.classes = list(classes)
        self.columns = {name: values.contiguous() for name, values in columns.items()}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self.columns.items()}

    @property
    def batch(self) -> Callable[[Sequence[int]], Batch] | None:
        """Function that fetches many samples at once, collated; None if each is transformed."""
        return self._fetch

    def _fetch(self, indices: Sequence[int]) -> Batch:
        """Return copies of the rows."""
        # torch.as_tensor takes ten times as long for a list of integers
        chosen = torch.from_numpy(np.fromiter(indices, dtype=np.int64, count=len(indices)))
        return {name: values.index_select(0, chosen) for name, values in self.columns.items()}

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover every number, and the names of targets or classes."""
        shape = [tuple(self.columns["image"].shape)] if "image" in self.columns else []
        digest = xxhash.xxh3_128(repr((*shape, self.classes)).encode())
        for values in self.columns.values():
            digest.update(values.numpy())
        return digest.hexdigest()


class InMemoryImages(NumberRows):
    """Samples `{"image": uint8[C, H, W], "label": int}` from one tensor, which a subclass loads.

    Args:
        images: uint8[N, C, H, W], or clips uint8[N, T, C, H, W].
        labels: int64[N].
        classes: The labels' names.
        transform: Applied to each image, in the worker.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        classes: Sequence[str],
        transform: Transform | None = None,
    ) -> None:
        super().__init__(classes, image=images, label=labels)
        self._transform = transform

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.columns["image"][index]
        return {
            "image": image if self._transform is None else self._transform(image),
            "label": int(self.columns["label"][index]),
        }

    @property
    def batch(self) -> Callable[[Sequence[int]], Batch] | None:
        return self._fetch if self._transform is None else None
