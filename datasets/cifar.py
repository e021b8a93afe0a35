"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32x32 pixels.

torchvision loads and verifies them. Source: Krizhevsky 2009, Learning Multiple Layers of Features
from Tiny Images, https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from typing import Literal, final

import torch
import torchvision.datasets

from samewise.datasets.parts.in_memory import InMemoryImages, Transform
from samewise.datasets.parts.torchvision_files import load_part, split_held_out

Split = Literal["train", "valid", "test"]


class _CIFAR(InMemoryImages):
    """Base of both data sets.

    Args:
        root: The folder that holds the data set's folder.
        split: "train" or "valid", which share the 50,000 training images, or "test", the 10,000
            test images.
        held_out: Number of training images, the last ones, that are "valid"; 5,000 as in He et al.
            2015 (arXiv 1512.03385). 0 leaves all images to "train".
        download: Download missing files.
        transform: Applied to each image.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind: type[torchvision.datasets.CIFAR10]

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
            f"a folder {kind.base_folder} with "
            f"{', '.join(name for name, _ in kind.train_list + kind.test_list)} as published"
        )
        data = load_part(kind, split, root=root, expected=expected, download=download)
        # torchvision has the images as [N, H, W, C]
        images, labels = torch.from_numpy(data.data).permute(0, 3, 1, 2), torch.tensor(data.targets)
        super().__init__(
            *split_held_out(images, labels, split=split, held_out=held_out),
            classes=data.classes,
            transform=transform,
        )


@final
class CIFAR10(_CIFAR):
    """Samples `{"image": uint8[3, 32, 32], "label": int}` of ten classes.

    Args:
        root: The folder that holds `cifar-10-batches-py`.
        split, held_out, download, transform: As in `_CIFAR`.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind = torchvision.datasets.CIFAR10


@final
class CIFAR100(_CIFAR):
    """Samples `{"image": uint8[3, 32, 32], "label": int}` of a hundred classes.

    Args:
        root: The folder that holds `cifar-100-python`.
        split, held_out, download, transform: As in `_CIFAR`.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind = torchvision.datasets.CIFAR100
