"""Transforms of images with masks of classes: padding of samples, flips on the device.

The transforms in `colour` and `numeric` accept these batches too. For samples, torchvision's v2
crop, resize, turn and flip both.
"""

from collections.abc import Mapping
from typing import Any, final

from torchvision import tv_tensors
from torchvision.transforms import v2

from samewise.datasets.parts.masks import IGNORED
from samewise.datasets.transforms.geometry import Flip
from samewise.datasets.transforms.images import pair


@final
class PadIfSmaller:
    """Pads a sample on the right and below to a least size: its image with 0, its mask with 255.

    As in torchvision's references/segmentation, before its random crop.

    Args:
        size: Least height and width in pixels: one number, or [height, width].

    Raises:
        ConfigError: The size is not valid.
    """

    def __init__(self, size: Any) -> None:
        self.size = pair("size", size)

    def __call__(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        height, width = sample["image"].shape[-2:]
        missing = [0, 0, max(0, self.size[1] - width), max(0, self.size[0] - height)]
        return v2.Pad(missing, fill={tv_tensors.Image: 0, tv_tensors.Mask: IGNORED})(sample)


@final
class RandomHorizontalFlipWithMask(Flip):
    """Flip of images and masks from left to right, with probability `p`.

    Choices: `flip`, bool[B].

    Args:
        p: Probability for each image.
    """

    keys = ("image", "mask")
