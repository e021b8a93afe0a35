"""Stripes under noise, generated on the spot: replace them with your own data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = ("horizontal", "vertical", "diagonal")
FIRST = {"train": 0, "valid": 1_000_000}


class Stripes(Dataset[dict[str, Tensor | int]]):
    """Samples {"image": uint8[1, size, size], "label": int}. A sample depends on its index alone.

    Args:
        split: train or valid; no sample is in both.
        length: Number of samples.
        size: Height and width in pixels.
    """

    def __init__(self, *, split: str, length: int, size: int) -> None:
        self.classes = CLASSES  # names in the confusion matrix and in pictures of predictions
        self.length = length
        self.size = size
        self.first = FIRST[split]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        random = torch.Generator().manual_seed(self.first + index)
        label = index % len(CLASSES)
        y, x = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        period, shift = torch.randint(3, 7, (2,), generator=random).tolist()
        stripes = ((y, x, x + y)[label] + shift) // period % 2
        noise = torch.randint(0, 200, (1, self.size, self.size), generator=random)
        return {"image": (stripes * 55 + noise).to(torch.uint8), "label": label}
