"""Random erasing."""

from __future__ import annotations

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
    """A box set to `value`, with probability `p` (arXiv 1708.04896).

    Choices: `top`, `left`, `height`, `width`, int64[B]; height 0 erases nothing.

    Args:
        p: The probability for an image.
        scale: The box's share of the image's area.
        ratio: Height / width of the box.
        value: In the images' own scale, so 0 after Normalize is the mean; one number, or one a
            channel.
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
        boxes = random_boxes(size, image_size(batch), self.scale, (1 / high, 1 / low), whole=False)
        height = torch.where(chosen & boxes.found, boxes.height, 0)
        return {"top": boxes.top, "left": boxes.left, "height": height, "width": boxes.width}

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        value = (
            torch.tensor(self.value, dtype=images.dtype)
            .view(-1, 1, 1)
            .to(images.device, non_blocking=True)
        )
        return torch.where(inside(images, **choices), value, images)


def inside(images: Tensor, *, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """bool[B, 1, H, W] (of clips, [B, 1, 1, H, W]): which pixels of each image are in its box,
    int64[B] each in pixels.
    """
    first_row, first_column, rows, columns = (
        per_sample(value, images) for value in (top, left, height, width)
    )
    row = torch.arange(images.shape[-2], device=images.device).view(-1, 1)
    column = torch.arange(images.shape[-1], device=images.device)
    return (
        (row >= first_row)
        & (row < first_row + rows)
        & (column >= first_column)
        & (column < first_column + columns)
    )
