"""Base of data sets whose images are all in memory."""

from __future__ import annotations

import abc
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


class InMemoryImages(Dataset[dict[str, Any]], abc.ABC):
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
        assert images.dtype == torch.uint8 and images.dim() in (4, 5), images.shape
        assert (labels.dtype, labels.shape) == (torch.int64, images.shape[:1]), labels.shape
        self.classes = list(classes)
        self._images = images.contiguous()
        self.labels = labels.contiguous()
        self._transform = transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self._images[index]
        return {
            "image": image if self._transform is None else self._transform(image),
            "label": int(self.labels[index]),
        }

    @property
    def batch(self) -> Callable[[Sequence[int]], Batch] | None:
        """Function that fetches many samples at once, collated; None if each is transformed."""
        return self._fetch if self._transform is None else None

    def _fetch(self, indices: Sequence[int]) -> Batch:
        """Return copies: `{"image": uint8[B, C, H, W], "label": int64[B]}`."""
        # torch.as_tensor takes ten times as long for a list of integers
        chosen = torch.from_numpy(np.fromiter(indices, dtype=np.int64, count=len(indices)))
        return {
            "image": self._images.index_select(0, chosen),
            "label": self.labels.index_select(0, chosen),
        }

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover every pixel, every label and the classes' names."""
        digest = xxhash.xxh3_128(repr((tuple(self._images.shape), self.classes)).encode())
        digest.update(self._images.numpy())
        digest.update(self.labels.numpy())
        return digest.hexdigest()
