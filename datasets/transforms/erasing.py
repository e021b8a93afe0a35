"""Random erasing."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from samewise.datasets.transforms.boxes import random_boxes
from samewise.datasets.transforms.images import (
    ImageTransform,
    chance,
    image_size,
    interval,
    per_sample,
)
from samewise.runner.interfaces import Batch


@final
class RandomErasing(ImageTransform):
    """A box set to `value`, with probability `p`.

    Source: Zhong et al. 2017, Random Erasing Data Augmentation, arXiv 1708.04896. Choices: `top`,
    `left`, `height`, `width`, int64[B] in pixels; height 0 erases nothing.

    Args:
        p: Probability for each image.
        scale: Interval of the box's share of the image's area.
        ratio: Interval of the box's height / width.
        value: Value of the box on the images' own scale, so 0 after Normalize is the mean; one
            number, or one for each channel.

    Raises:
        ConfigError: `p` is not a probability, or an interval is not valid.
    """

    def __init__(
        self,
        p: float = 0.5,
        *,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] = 0.0,
    ) -> None:
        super().__init__()
        self.p = chance("p", p)
        self.scale, self.ratio = (
            interval("scale", scale, low=0.0),
            interval("ratio", ratio, low=1e-9),
        )
        self.value = (
            [float(value)]
            if isinstance(value, int | float)
            else [float(number) for number in value]
        )

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        chosen = torch.rand(size) < self.p
        low, high = self.ratio
        # `ratio` is height / width, random_boxes' is width / height
        boxes = random_boxes(size, image_size(batch), self.scale, (1 / high, 1 / low), whole=False)
        height = torch.where(chosen & boxes.fits, boxes.height, 0)
        return {"top": boxes.top, "left": boxes.left, "height": height, "width": boxes.width}

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        value = (
            torch.tensor(self.value, dtype=images.dtype)
            .view(-1, 1, 1)
            .to(images.device, non_blocking=True)
        )
        return torch.where(inside(images, **choices), value, images)


def inside(images: Tensor, *, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Return bool[B, 1, H, W], or [B, 1, 1, H, W] for clips: the pixels inside each image's box.

    Args:
        images: The images [B, C, H, W] or clips [B, T, C, H, W].
        top: int64[B], the box's first row.
        left: int64[B], the box's first column.
        height: int64[B] in pixels.
        width: int64[B] in pixels.
    """
    first_row, first_column, rows, columns = (
        per_sample(value, images) for value in (top, left, height, width)
    )
    rows_of_image = torch.arange(images.shape[-2], device=images.device).view(-1, 1)
    columns_of_image = torch.arange(images.shape[-1], device=images.device)
    return (
        (rows_of_image >= first_row)
        & (rows_of_image < first_row + rows)
        & (columns_of_image >= first_column)
        & (columns_of_image < first_column + columns)
    )
