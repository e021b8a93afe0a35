"""Transforms of images with boxes, on the device: flips and resizing.

The colour transforms in `colour` accept these batches too.

A batch's images are one tensor [B, C, H, W] or, where they differ in size, a list of B tensors [C,
H, W]; `boxes` is a list of float32[N, 4], (x1, y1, x2, y2) in pixels. Crops (RandomIoUCrop,
RandomZoomOut) change how many boxes there are: they are torchvision's, on samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from samewise.datasets.transforms.geometry import Flip
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch, BatchTransform


class _BoxFlip(Flip):
    """Choices: `flip`, bool[B]."""

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        images, flip = batch["image"], choices["flip"].tolist()
        boxes = [
            self._mirror(one, image) if flipped else one
            for one, image, flipped in zip(batch["boxes"], images, flip, strict=True)
        ]
        if isinstance(images, Tensor):
            return {**batch, "image": self.change(images, choices), "boxes": boxes}
        flipped = [
            image.flip(self.dimension) if turned else image
            for image, turned in zip(images, flip, strict=True)
        ]
        return {**batch, "image": flipped, "boxes": boxes}

    def _mirror(self, boxes: Tensor, image: Tensor) -> Tensor:
        """Boxes float32[N, 4] of an image [C, H, W]."""
        x1, y1, x2, y2 = boxes.unbind(1)
        height, width = image.shape[-2:]
        return torch.stack(
            [width - x2, y1, width - x1, y2]
            if self.dimension == -1
            else [x1, height - y2, x2, height - y1],
            dim=1,
        )


@final
class RandomHorizontalFlipWithBoxes(_BoxFlip):
    """Flip from left to right. Choices: `flip`, bool[B]."""

    dimension = -1


@final
class RandomVerticalFlipWithBoxes(_BoxFlip):
    """Flip from top to bottom. Choices: `flip`, bool[B]."""

    dimension = -2


@final
class RandomShortestSide(BatchTransform):
    """Each image resized so that its shorter side is one of several lengths, and its longer side at
    most `longest` (bilinear, antialiased).

    As RandomShortestSize of torchvision's references; with model.resize_in_training=false. Choices:
    `shortest`, int64[B], in pixels.

    Args:
        shortest: The lengths, in pixels, each as likely.
        longest: In pixels.
    """

    def __init__(self, *, shortest: Sequence[int], longest: int) -> None:
        super().__init__()
        if not shortest or min(shortest) < 1 or longest < max(shortest):
            words = "shortest and longest do not fit together"
            raise ConfigError(
                Problem(
                    "transforms",
                    words,
                    {"shortest": list(shortest), "longest": longest},
                    "pixels, longest last",
                )
            )
        self.shortest = torch.tensor(list(shortest))
        self.longest = longest

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {"shortest": self.shortest[torch.randint(len(self.shortest), (size,))]}

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        images, boxes = [], []
        for image, own, shortest in zip(
            batch["image"], batch["boxes"], choices["shortest"].tolist(), strict=True
        ):
            height, width = image.shape[-2:]
            ratio = min(shortest / min(height, width), self.longest / max(height, width))
            size = [max(1, int(height * ratio)), max(1, int(width * ratio))]
            images.append(functional.resize(image, size, antialias=True))
            scale = torch.tensor(
                [size[1] / width, size[0] / height] * 2, dtype=own.dtype, device=own.device
            )
            boxes.append(own * scale)
        same = isinstance(batch["image"], Tensor) and len({image.shape for image in images}) == 1
        sizes = (
            {"file_size": [tuple(image.shape[-2:]) for image in batch["image"]], **batch}
            if "area" in batch
            else batch
        )
        return {**sizes, "image": torch.stack(images) if same else images, "boxes": boxes}
