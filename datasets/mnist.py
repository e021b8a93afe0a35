"""MNIST and Fashion-MNIST: 70,000 grey images of 28x28 pixels, 10,000 of them "test".

torchvision loads and verifies them. Sources: LeCun et al. 1998, Gradient-Based Learning Applied to
Document Recognition; Xiao et al. 2017, Fashion-MNIST, arXiv 1708.07747.
"""

from typing import final

import torchvision.datasets

from samewise.datasets.parts.torchvision_files import TorchvisionImages


@final
class MNIST(TorchvisionImages):
    """Samples `{"image": uint8[1, 28, 28], "label": int}` of the ten digits.

    Args:
        root: The folder that holds `MNIST/raw`.
        split, held_out, download, transform: As in `TorchvisionImages`.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind = torchvision.datasets.MNIST
    names = tuple(map(str, range(10)))


@final
class FashionMNIST(TorchvisionImages):
    """Samples `{"image": uint8[1, 28, 28], "label": int}` of ten kinds of clothes.

    Args:
        root: The folder that holds `FashionMNIST/raw`.
        split, held_out, download, transform: As in `TorchvisionImages`.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind = torchvision.datasets.FashionMNIST
