"""MNIST (LeCun et al. 1998) and Fashion-MNIST (arXiv 1708.07747): 70,000 grey images of 28x28
pixels, loaded and verified by torchvision.
"""

from __future__ import annotations

from typing import Literal, final

import torch
import torchvision.datasets

from samewise.datasets.parts import torchvision_files
from samewise.datasets.parts.in_memory import InMemoryImages, Transform

Split = Literal["train", "valid", "test"]


@final
class MNIST(InMemoryImages):
    """Samples `{"image": uint8[1, 28, 28], "label": int}` of the ten digits.

    Args:
        root: The folder that holds `MNIST/raw`.
        split: "train" or "valid", cut from the 60,000 training images, or "test", the 10,000
            others.
        held_out: How many of the training images, the last ones, are "valid". 0: "train" has them
            all.
        download: Fetch the files where they are missing.
        transform: Applied to each image.

    Raises:
        DataError: the files are missing or altered.
        ConfigError: the split would be empty.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Split,
        held_out: int = 5000,
        download: bool = False,
        transform: Transform | None = None,
    ) -> None:
        images, labels = _read(
            torchvision.datasets.MNIST, root=root, split=split, held_out=held_out, download=download
        )
        super().__init__(
            images, labels, classes=[str(digit) for digit in range(10)], transform=transform
        )


@final
class FashionMNIST(InMemoryImages):
    """Samples `{"image": uint8[1, 28, 28], "label": int}` of ten kinds of clothes.

    Args:
        root: The folder that holds `FashionMNIST/raw`.
        split, held_out, download, transform: As in `MNIST`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Split,
        held_out: int = 5000,
        download: bool = False,
        transform: Transform | None = None,
    ) -> None:
        images, labels = _read(
            torchvision.datasets.FashionMNIST,
            root=root,
            split=split,
            held_out=held_out,
            download=download,
        )
        super().__init__(
            images, labels, classes=torchvision.datasets.FashionMNIST.classes, transform=transform
        )


def _read(
    kind: type[torchvision.datasets.MNIST],
    *,
    root: str,
    split: Split,
    held_out: int,
    download: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    expected = (
        f"a folder {kind.__name__}/raw with "
        f"{', '.join(name.removesuffix('.gz') for name, _ in kind.resources)}"
    )
    data = torchvision_files.load_part(kind, split, root=root, expected=expected, download=download)
    return torchvision_files.split_held_out(
        data.data[:, None], data.targets.long(), split=split, held_out=held_out
    )
