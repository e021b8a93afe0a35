"""Reads tiles from a NumPy archive, a format that samewise itself does not read."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Tiles(Dataset[dict[str, Tensor | int]]):
    """Samples {"image": uint8[3, size, size], "label": int}.

    Args:
        file: The archive that make_tiles.py writes.
        split: train, or valid: the columns at the right of each photograph, so that no tile for
            validation lies between tiles for training.
        valid_from: The first column for validation.
    """

    def __init__(self, *, file: str, split: str, valid_from: int) -> None:
        if not Path(file).is_file():
            raise FileNotFoundError(f"{file}: run `python make_tiles.py` first")
        archive = numpy.load(file)
        selected = (archive["columns"] >= valid_from) == (split == "valid")
        self.images = torch.from_numpy(archive["images"][selected])
        self.labels = archive["labels"][selected].tolist()
        self.classes = ("temple", "flower")  # names in the confusion matrix and in pictures

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        return {"image": self.images[index], "label": self.labels[index]}
