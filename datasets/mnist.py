"""MNIST (LeCun et al. 1998) and Fashion-MNIST (arXiv 1708.07747): 70,000 grey images of 28x28
pixels, loaded and verified by torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import torchvision.datasets

from samewise.datasets.parts.in_memory import InMemoryImages, Transform
from samewise.datasets.parts.torchvision_files import load_part, split_held_out

Split = Literal["train", "valid", "test"]


class _MNIST(InMemoryImages):
    kind: type[torchvision.datasets.MNIST]
    names: Sequence[str] = tuple(map(str, range(10)))

    def __init__(
        self,
        *,
        root: str,
        split: Split,
        held_out: int = 5000,
        download: bool = False,
        transform: Transform | None = None,
    ) -> None:
        kind = self.kind
        expected = (
            f"a folder {kind.__name__}/raw with "
            f"{', '.join(name.removesuffix('.gz') for name, _ in kind.resources)}"
        )
        data = load_part(kind, split, root=root, expected=expected, download=download)
        images, labels = data.data[:, None], data.targets.long()
        super().__init__(
            *split_held_out(images, labels, split=split, held_out=held_out),
            classes=self.names,
            transform=transform,
        )


@final
class MNIST(_MNIST):
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

    kind = torchvision.datasets.MNIST


@final
class FashionMNIST(_MNIST):
    """Samples `{"image": uint8[1, 28, 28], "label": int}` of ten kinds of clothes.

    Args:
        root: The folder that holds `FashionMNIST/raw`.
        split, held_out, download, transform: As in `MNIST`.
    """

    kind = torchvision.datasets.FashionMNIST
    names = torchvision.datasets.FashionMNIST.classes
