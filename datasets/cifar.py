"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32x32 pixels.

torchvision loads and verifies them. Source: Krizhevsky 2009, Learning Multiple Layers of Features
from Tiny Images, https://www.cs.toronto.edu/~kriz/cifar.html. By default 5,000 of the 50,000
training images are "valid", as in He et al. 2015 (arXiv 1512.03385); 10,000 are "test".
"""

from typing import final

import torchvision.datasets

from samewise.datasets.parts.torchvision_files import TorchvisionImages


@final
class CIFAR10(TorchvisionImages):
    """Samples `{"image": uint8[3, 32, 32], "label": int}` of ten classes.

    Args:
        root: The folder that holds `cifar-10-batches-py`.
        split, held_out, download, transform: As in `TorchvisionImages`.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind = torchvision.datasets.CIFAR10


@final
class CIFAR100(TorchvisionImages):
    """Samples `{"image": uint8[3, 32, 32], "label": int}` of a hundred classes.

    Args:
        root: The folder that holds `cifar-100-python`.
        split, held_out, download, transform: As in `TorchvisionImages`.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind = torchvision.datasets.CIFAR100
