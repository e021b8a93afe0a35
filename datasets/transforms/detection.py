"""Transforms of images with boxes, on the device: flips and resizing.

The colour transforms in `colour` accept these batches too.

A batch's images are one tensor [B, C, H, W] or, if they differ in size, a list of B tensors [C, H,
W]; `boxes` is a list of float32[N, 4], (x1, y1, x2, y2) in pixels, and `masks`, if there are any, a
list of uint8[N, H, W]. Crops (RandomIoUCrop, RandomZoomOut) change the number of boxes: they are
torchvision's, on samples.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from samewise.datasets.transforms.geometry import Flip
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Batch, BatchTransform


class _BoxFlip(Flip):
    """Flip of images and their boxes.

    Choices: `flip`, bool[B].
    """

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        images, flip = batch["image"], choices["flip"].tolist()
        boxes = [
            self._mirror(image_boxes, image) if flipped else image_boxes
            for image_boxes, image, flipped in zip(batch["boxes"], images, flip, strict=True)
        ]
        batch = {**batch, "boxes": boxes}
        if "masks" in batch:
            batch["masks"] = [
                mask.flip(self.dimension) if is_flipped else mask
                for mask, is_flipped in zip(batch["masks"], flip, strict=True)
            ]
        if isinstance(images, Tensor):
            return {**batch, "image": self.change(images, choices)}
        flipped = [
            image.flip(self.dimension) if is_flipped else image
            for image, is_flipped in zip(images, flip, strict=True)
        ]
        return {**batch, "image": flipped}

    def _mirror(self, boxes: Tensor, image: Tensor) -> Tensor:
        """Mirror the boxes float32[N, 4] of an image [C, H, W]."""
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
    """Flip of images and boxes from left to right, with probability `p`.

    Choices: `flip`, bool[B].

    Args:
        p: Probability for each image.
    """

    dimension = -1


@final
class RandomVerticalFlipWithBoxes(_BoxFlip):
    """Flip of images and boxes from top to bottom, with probability `p`.

    Choices: `flip`, bool[B].

    Args:
        p: Probability for each image.
    """

    dimension = -2


@final
class RandomShortestSide(BatchTransform):
    """Resizes each image so that its shorter side has one of several lengths.

    As RandomShortestSize of torchvision's references (bilinear, with antialiasing). Set
    model.resize_in_training=false with it. Choices: `shortest`, int64[B], in pixels.

    Args:
        shortest: Lengths of the shorter side in pixels, each equally likely.
        longest: Upper limit of the longer side in pixels.

    Raises:
        ConfigError: The lengths are not valid, or `longest` is shorter than one of them.
    """

    def __init__(self, *, shortest: Sequence[int], longest: int) -> None:
        super().__init__()
        ConfigError.raise_if(
            not shortest or min(shortest) < 1 or longest < max(shortest),
            "transforms",
            "shortest and longest do not fit together",
            {"shortest": list(shortest), "longest": longest},
            "pixels, longest last",
        )
        self.shortest = torch.tensor(list(shortest))
        self.longest = longest

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {"shortest": self.shortest[torch.randint(len(self.shortest), (size,))]}

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        images, boxes = [], []
        for image, image_boxes, shortest in zip(
            batch["image"], batch["boxes"], choices["shortest"].tolist(), strict=True
        ):
            height, width = image.shape[-2:]
            ratio = min(shortest / min(height, width), self.longest / max(height, width))
            size = [max(1, int(height * ratio)), max(1, int(width * ratio))]
            images.append(functional.resize(image, size, antialias=True))
            scale = torch.tensor(
                [size[1] / width, size[0] / height] * 2,
                dtype=image_boxes.dtype,
                device=image_boxes.device,
            )
            boxes.append(image_boxes * scale)
        is_one_size = (
            isinstance(batch["image"], Tensor) and len({image.shape for image in images}) == 1
        )
        sizes = (
            # An earlier size stays: results are in pixels of the file
            {"file_size": [tuple(image.shape[-2:]) for image in batch["image"]], **batch}
            if "area" in batch
            else batch
        )
        if "masks" in batch:
            masks = [
                functional.resize_mask(mask, list(x.shape[-2:]))
                for mask, x in zip(batch["masks"], images, strict=True)
            ]
            sizes = {**sizes, "masks": masks}
        return {**sizes, "image": torch.stack(images) if is_one_size else images, "boxes": boxes}
