"""MNIST and Fashion-MNIST: 70,000 grey images of 28x28 pixels.

torchvision loads and verifies them. Sources: LeCun et al. 1998, Gradient-Based Learning Applied to
Document Recognition; Xiao et al. 2017, Fashion-MNIST, arXiv 1708.07747.
"""

from collections.abc import Sequence
from typing import Literal, final

import torchvision.datasets

from samewise.datasets.parts.in_memory import InMemoryImages, Transform
from samewise.datasets.parts.torchvision_files import load_part, split_held_out

Split = Literal["train", "valid", "test"]


class _MNIST(InMemoryImages):
    """Base of both data sets.

    Args:
        root: The folder that holds the data set's folder.
        split: "train" or "valid", which share the 60,000 training images, or "test", the 10,000
            test images.
        held_out: Number of training images, the last ones, that are "valid". 0 leaves all images to
            "train".
        download: Download missing files.
        transform: Applied to each image.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

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
        split, held_out, download, transform: As in `_MNIST`.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind = torchvision.datasets.MNIST


@final
class FashionMNIST(_MNIST):
    """Samples `{"image": uint8[1, 28, 28], "label": int}` of ten kinds of clothes.

    Args:
        root: The folder that holds `FashionMNIST/raw`.
        split, held_out, download, transform: As in `_MNIST`.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind = torchvision.datasets.FashionMNIST
    names = torchvision.datasets.FashionMNIST.classes
