"""Random boxes by area and aspect ratio, as RandomResizedCrop and RandomErasing choose them.

Each sample has ten tries; the first that fits counts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samewise.datasets.transforms.images import integers

_TRIES = 10


@dataclass(frozen=True)
class Boxes:
    """Boxes in pixels, one for each sample.

    Args:
        top: int64[B], first row.
        left: int64[B], first column.
        height: int64[B].
        width: int64[B].
        fits: bool[B], whether any try fitted.
    """

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    fits: Tensor


def random_boxes(
    size: int,
    image: tuple[int | Tensor, int | Tensor],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    *,
    whole: bool,
) -> Boxes:
    """Draw boxes in images of (H, W).

    Args:
        size: Number of boxes.
        image: (H, W), each a number for all or int64[B].
        scale: Interval of the box's share of the image's area, uniform.
        ratio: Interval of width / height, uniform in its logarithm.
        whole: Whether a box may be as high or as wide as the image.
    """
    high_image, wide_image = (torch.as_tensor(side).expand(size) for side in image)
    area = (high_image * wide_image)[:, None] * (
        torch.rand(size, _TRIES, dtype=torch.float64) * (scale[1] - scale[0]) + scale[0]
    )
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(torch.rand(size, _TRIES, dtype=torch.float64) * (high - low) + low)
    width, height = (area * aspect).sqrt().round().long(), (area / aspect).sqrt().round().long()
    spare = 0 if whole else 1
    fits = (
        (width > 0)
        & (height > 0)
        & (width <= wide_image[:, None] - spare)
        & (height <= high_image[:, None] - spare)
    )
    # argmax returns the first of equal values
    first_fit = fits.long().argmax(1, keepdim=True)
    height = height.gather(1, first_fit)[:, 0].clamp(max=high_image)
    width = width.gather(1, first_fit)[:, 0].clamp(max=wide_image)
    top, left = integers(high_image - height + 1), integers(wide_image - width + 1)
    return Boxes(top, left, height, width, fits.any(1))
