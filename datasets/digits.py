"""The handwritten digits in scikit-learn: 1,797 grey images of 8x8 pixels, without a download."""

import importlib.util
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch

from samewise.datasets.parts.in_memory import InMemoryImages, Transform

_FIRST_OF_LAST_FIFTH = 1437


@final
class Digits(InMemoryImages):
    """Samples `{"image": uint8[1, 8, 8], "label": int}`.

    The file's grey values 0 to 16 are scaled to 0 to 255.

    The images are the test part of the UCI set "Optical Recognition of Handwritten Digits"
    (Alpaydin and Kaynak 1998, https://doi.org/10.24432/C50P49): digits by 13 people, in blocks,
    without the writers' names. Two fixed ways hold out a fifth:

    - "spread": every fifth image of each class (355 of 1,797). The same writers are in both splits,
      with equal shares of classes, as in the random stratified splits that published figures use.
    - "writers": the last fifth of the file (360 of 1,797), so mostly writers that are not in
      training: the harder task.

    Args:
        split: "train" or "valid".
        hold_out: "spread" or "writers".
        transform: Applied to each image.
    """

    def __init__(
        self,
        *,
        split: Literal["train", "valid"],
        hold_out: Literal["spread", "writers"] = "spread",
        transform: Transform | None = None,
    ) -> None:
        # uint8[1797, 65]: 64 grey values from 0 to 16, row by row, and the digit
        table = np.loadtxt(
            scikit_learn_file("digits.csv.gz"), delimiter=",", dtype=np.float32
        ).astype(np.uint8)
        images = (table[:, :64].astype(np.uint16) * 255 // 16).astype(np.uint8).reshape(-1, 1, 8, 8)
        labels = table[:, 64].astype(np.int64)
        held_out = (
            _every_fifth_of_each_class(labels)
            if hold_out == "spread"
            else np.arange(len(labels)) >= _FIRST_OF_LAST_FIFTH
        )
        chosen = held_out if split == "valid" else ~held_out
        super().__init__(
            torch.from_numpy(images[chosen]),
            torch.from_numpy(labels[chosen]),
            classes=[str(digit) for digit in range(10)],
            transform=transform,
        )


def _every_fifth_of_each_class(labels: np.ndarray) -> np.ndarray:
    """Return bool[N]: true for the fifth, tenth, ... image of each class, in the file's order."""
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        held_out[np.flatnonzero(labels == digit)[4::5]] = True
    return held_out


def scikit_learn_file(name: str) -> Path:
    """Return a file of the data that come with scikit-learn."""
    # Importing scikit-learn would take over a second: its file is read without
    spec: Any = importlib.util.find_spec("sklearn")
    return Path(spec.origin).parent / "datasets" / "data" / name
