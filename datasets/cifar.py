"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 60,000 colour images of 32x32 pixels, loaded and
verified by torchvision.
"""

from __future__ import annotations

from typing import Literal, final

import torch
import torchvision.datasets

from samewise.datasets.parts.in_memory import InMemoryImages, Transform
from samewise.datasets.parts.torchvision_files import load_part, split_held_out

Split = Literal["train", "valid", "test"]


class _CIFAR(InMemoryImages):
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
        split: "train" or "valid", cut from the 50,000 training images, or "test", the 10,000
            others.
        held_out: How many of the training images, the last ones, are "valid": 5,000 as in He et al.
            2015. 0: "train" has them all.
        download: Fetch the files where they are missing.
        transform: Applied to each image.

    Raises:
        DataError: the files are missing or altered.
        ConfigError: the split would be empty.
    """

    kind = torchvision.datasets.CIFAR10


@final
class CIFAR100(_CIFAR):
    """Samples `{"image": uint8[3, 32, 32], "label": int}` of a hundred classes.

    Args:
        root: The folder that holds `cifar-100-python`.
        split, held_out, download, transform: As in `CIFAR10`.
    """

    kind = torchvision.datasets.CIFAR100
