"""Flips, crops and resizing.

Each agrees with the torchvision transform of its name, given the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional
from torchvision.transforms.v2.functional import InterpolationMode

from samewise.datasets.transforms.boxes import random_boxes
from samewise.datasets.transforms.images import (
    ImageTransform,
    chance,
    image_size,
    image_sizes,
    integers,
    interval,
    pair,
    per_sample,
)
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch

_STRIDE = -0x61C8864680B583EB
"""splitmix64's, 0x9E3779B97F4A7C15, as a signed number; likewise the factors of `_mixed`."""


class Flip(ImageTransform):
    """Each image as it is, or flipped along `dimension`, from left to right where a subclass names
    no other. Choices: `flip`, bool[B].

    Args:
        p: The probability of a flip.
    """

    moves_pixels = True
    dimension = -1

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = chance("p", p)

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {"flip": torch.rand(size) < self.p}

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        return torch.where(per_sample(choices["flip"], images), images.flip(self.dimension), images)


@final
class RandomHorizontalFlip(Flip):
    """Flip from left to right, with probability `p`. Choices: `flip`, bool[B]."""


@final
class AlternatingHorizontalFlip(Flip):
    """Left and right exchanged in every second epoch.

    For half of the images, which half being random, that is the first, third, ... of them.

    So any two epochs in a row show each image once as it is and once flipped, where random flips
    show half of the images twice alike (K. Jordan 2024, arXiv 2404.00498, section 3.6). A function
    of seed, epoch and the image's index, so neither workers nor a resumed run change it.

    Args:
        seed: Another seed, another half.
    """

    needs_places = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._start = int(_mix_bits(torch.tensor(seed)))

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        if "place" not in batch:
            hint = "in transforms.eval, leave it out"
            raise ConfigError(
                Problem(
                    "transforms",
                    f"{type(self).__name__} is only for training",
                    sorted(batch),
                    "an entry `place` in the batch",
                    hint,
                )
            )
        epoch, index = batch["place"].unbind(1)
        is_first = _mix_bits(index * _STRIDE + self._start) < 0
        return super().apply(batch, {"flip": is_first == (epoch % 2 == 0)})

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {}


@final
class RandomVerticalFlip(Flip):
    """Flip from top to bottom, with probability `p`. Choices: `flip`, bool[B]."""

    dimension = -2


@final
class RandomCrop(ImageTransform):
    """A window of `size` anywhere in the padded image. Choices: `top`, `left`, int64[B].

    Args:
        size: Of the window: one number, or [height, width].
        padding: Pixels added on each of the four sides before.
        fill: The value of added pixels, in the images' own scale (constant padding).
        padding_mode: constant, edge, reflect or symmetric.
    """

    moves_pixels = True

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        padding: int = 0,
        fill: float = 0.0,
        padding_mode: str = "constant",
    ) -> None:
        super().__init__()
        self.size = pair("size", size)
        self.padding, self.fill, self.padding_mode = padding, fill, padding_mode

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        spare = [
            side + 2 * self.padding - wanted
            for side, wanted in zip(image_size(batch), self.size, strict=True)
        ]
        if min(spare) < 0:
            hint = "more padding, or Resize first"
            raise ConfigError(
                Problem(
                    "transforms",
                    f"RandomCrop of {self.size} is larger than the padded image",
                    image_size(batch),
                    hint=hint,
                )
            )
        return {
            "top": integers(torch.full((size,), spare[0] + 1)),
            "left": integers(torch.full((size,), spare[1] + 1)),
        }

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        if self.padding:
            images = functional.pad(
                images, [self.padding] * 4, fill=self.fill, padding_mode=self.padding_mode
            )
        # A view: [B, C, tops, lefts, height, width]
        windows = images.unfold(2, self.size[0], 1).unfold(3, self.size[1], 1)
        which = [torch.arange(len(images)), choices["top"], choices["left"]]
        sample, top, left = (index.to(images.device, non_blocking=True) for index in which)
        return windows[sample, :, top, left]


@final
class RandomResizedCrop(ImageTransform):
    """A box of random area and aspect ratio, resized to `size` (arXiv 1409.4842).

    Choices: `top`, `left`, `height`, `width`, int64[B].

    Images that differ in size come as a list (`transforms.decode`), and leave as one tensor.

    Args:
        size: Of the result: one number, or [height, width].
        scale: The box's share of the image's area.
        ratio: Width / height of the box.
        interpolation: bilinear, bicubic or nearest.
        antialias: Smooth before shrinking.
    """

    moves_pixels = True
    gives_one_size = True

    def __init__(
        self,
        size: int | Sequence[int],
        *,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: str = "bilinear",
        antialias: bool = True,
    ) -> None:
        super().__init__()
        self.size = pair("size", size)
        self.scale, self.ratio = (
            interval("scale", scale, low=0.0),
            interval("ratio", ratio, low=1e-9),
        )
        self.interpolation, self.antialias = interpolation_of(interpolation), antialias

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        height, width = image_sizes(batch)
        boxes = random_boxes(size, (height, width), self.scale, self.ratio, whole=True)
        # Where no try fitted: the largest central box whose ratio is allowed, as torchvision does.
        low, high = self.ratio
        shape = width.double() / height
        tall = torch.where(shape < low, (width.double() / low).round().long(), height)
        wide = torch.where(shape > high, (height.double() * high).round().long(), width)
        central = {
            "top": (height - tall) // 2,
            "left": (width - wide) // 2,
            "height": tall,
            "width": wide,
        }
        return {
            name: torch.where(boxes.found, getattr(boxes, name), other)
            for name, other in central.items()
        }

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        # One by one: the antialiasing kernel's width differs from box to box, and this way the
        # pixels are torchvision's own.
        boxes = torch.stack(
            [choices[name] for name in ("top", "left", "height", "width")], dim=1
        ).tolist()
        return torch.stack(
            [
                functional.resized_crop(
                    image,
                    *box,
                    size=list(self.size),
                    interpolation=self.interpolation,
                    antialias=self.antialias,
                )
                for image, box in zip(images, boxes, strict=True)
            ]
        )


@final
class CenterCrop(ImageTransform):
    """The central window; smaller images are padded with zeros.

    Args:
        size: The window's [height, width], or one number for both.
    """

    moves_pixels = True
    gives_one_size = True

    def __init__(self, size: int | Sequence[int]) -> None:
        super().__init__()
        self.size = pair("size", size)

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        return functional.center_crop(images, list(self.size))


@final
class Resize(ImageTransform):
    """Resized images.

    Args:
        size: One number for the shorter side (keeping the ratio), or [height, width].
        interpolation: "nearest", "bilinear" or "bicubic".
        antialias: Whether to smooth what becomes smaller.
    """

    moves_pixels = True

    def __init__(
        self, size: int | Sequence[int], *, interpolation: str = "bilinear", antialias: bool = True
    ) -> None:
        super().__init__()
        height, width = pair("size", size)
        self.size = [height] if isinstance(size, int) else [height, width]
        self.gives_one_size = len(self.size) == 2
        self.interpolation, self.antialias = interpolation_of(interpolation), antialias

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        return functional.resize(
            images, self.size, interpolation=self.interpolation, antialias=self.antialias
        )


def _mix_bits(numbers: Tensor) -> Tensor:
    """int64 to int64, a bijection in which each bit depends on all: the finaliser of splitmix64
    (Steele, Lea, Flood 2014), modulo 2**64.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return numbers


def interpolation_of(name: str) -> InterpolationMode:
    """The mode with this name, checked."""
    known = {
        "nearest": InterpolationMode.NEAREST,
        "bilinear": InterpolationMode.BILINEAR,
        "bicubic": InterpolationMode.BICUBIC,
    }
    if name not in known:
        raise ConfigError(
            Problem("transforms", "unknown interpolation", name, "nearest, bilinear or bicubic")
        )
    return known[name]
