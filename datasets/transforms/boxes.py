"""Random boxes by area and aspect ratio, as RandomResizedCrop and RandomErasing choose them: ten
tries a sample, the first that fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from samewise.datasets.transforms.images import integers

_TRIES = 10


@dataclass(frozen=True)
class Boxes:
    """int64[B] each, in pixels; `found` is bool[B]: whether any try fitted."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    found: Tensor


def random_boxes(
    size: int,
    image: tuple[int | Tensor, int | Tensor],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    *,
    whole: bool,
) -> Boxes:
    """Boxes in images of (H, W).

    Args:
        size: How many.
        image: (H, W), a number for all or int64[B].
        scale: The box's share of the image's area, uniform.
        ratio: Width / height, uniform in its logarithm.
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
    first = fits.long().argmax(1, keepdim=True)  # of equal values argmax gives the first
    height, width, found = height.gather(1, first)[:, 0], width.gather(1, first)[:, 0], fits.any(1)
    height, width = height.clamp(max=high_image), width.clamp(max=wide_image)
    return Boxes(
        integers(high_image - height + 1), integers(wide_image - width + 1), height, width, found
    )
