"""Flips, crops and resizing.

Each agrees with the torchvision transform of its name, given the same choices.
"""

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
"""Increment of splitmix64, 0x9E3779B97F4A7C15, as a signed number."""


class Flip(ImageTransform):
    """Flip of each image along `dimension`, from left to right by default, with probability `p`.

    Choices: `flip`, bool[B].

    Args:
        p: Probability for each image.

    Raises:
        ConfigError: `p` is not a probability.
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
    """Flip from left to right, with probability `p`.

    Choices: `flip`, bool[B].

    Args:
        p: Probability for each image.
    """


@final
class AlternatingHorizontalFlip(Flip):
    """Flip from left to right in every second epoch.

    A random half of the images starts flipped, the other half not. So two consecutive epochs show
    each image once flipped and once not, while random flips show half of the images the same way
    twice. Source: K. Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv
    2404.00498, section 3.6.

    The flip is a function of seed, epoch and the image's index: neither workers nor a resumed run
    change it.

    Args:
        seed: Selects the half that starts flipped.

    Raises:
        ConfigError: It is used in evaluation.
    """

    needs_places = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._start = int(_mix_bits(torch.tensor(seed)))

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        if "place" not in batch:
            raise ConfigError(
                Problem(
                    "transforms",
                    f"{type(self).__name__} is only for training",
                    sorted(batch),
                    "an entry `place` in the batch",
                    "in transforms.eval, leave it out",
                )
            )
        epoch, index = batch["place"].unbind(1)
        # Half of all numbers are negative
        is_first = _mix_bits(index * _STRIDE + self._start) < 0
        return super().apply(batch, {"flip": is_first == (epoch % 2 == 0)})

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {}


@final
class RandomVerticalFlip(Flip):
    """Flip from top to bottom, with probability `p`.

    Choices: `flip`, bool[B].

    Args:
        p: Probability for each image.
    """

    dimension = -2


@final
class RandomCrop(ImageTransform):
    """A window of `size` anywhere in the padded image.

    Choices: `top`, `left`, int64[B] in pixels.

    Args:
        size: Size of the window in pixels: one number, or [height, width].
        padding: Pixels added on each of the four sides.
        fill: Value of added pixels on the images' own scale, for constant padding.
        padding_mode: "constant", "edge", "reflect" or "symmetric".

    Raises:
        ConfigError: The window is larger than the padded image.
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
            side + 2 * self.padding - length
            for side, length in zip(image_size(batch), self.size, strict=True)
        ]
        if min(spare) < 0:
            raise ConfigError(
                Problem(
                    "transforms",
                    f"RandomCrop of {self.size} is larger than the padded image",
                    image_size(batch),
                    hint="more padding, or Resize first",
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
        # A view [B, C, tops, lefts, height, width]: one indexing operation crops all images
        windows = images.unfold(2, self.size[0], 1).unfold(3, self.size[1], 1)
        indices = [torch.arange(len(images)), choices["top"], choices["left"]]
        sample, top, left = (index.to(images.device, non_blocking=True) for index in indices)
        return windows[sample, :, top, left]


@final
class RandomResizedCrop(ImageTransform):
    """A box of random area and aspect ratio, resized to `size`.

    Source: Szegedy et al. 2014, Going Deeper with Convolutions, arXiv 1409.4842. Choices: `top`,
    `left`, `height`, `width`, int64[B] in pixels. Images that differ in size come as a list
    (`transforms.decode`), and leave as one tensor.

    Args:
        size: Size of the result in pixels: one number, or [height, width].
        scale: Interval of the box's share of the image's area.
        ratio: Interval of the box's width / height.
        interpolation: "bilinear", "bicubic" or "nearest".
        antialias: Smooth before shrinking.

    Raises:
        ConfigError: A size, interval or interpolation is not valid.
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
        # If no try fits, the largest central box of an allowed ratio serves, as in torchvision
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
            name: torch.where(boxes.fits, getattr(boxes, name), fallback)
            for name, fallback in central.items()
        }

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        # The antialiasing kernel's width depends on the box: image by image, the pixels are
        # torchvision's own.
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
        size: Size of the window in pixels: one number, or [height, width].

    Raises:
        ConfigError: The size is not valid.
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
    """Resizes the images.

    Args:
        size: Size in pixels: one number for the shorter side (keeping the ratio), or [height,
            width].
        interpolation: "nearest", "bilinear" or "bicubic".
        antialias: Smooth before shrinking.

    Raises:
        ConfigError: The size or interpolation is not valid.
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
    """Map int64 to int64 by a bijection in which each bit depends on all.

    It is the finaliser of splitmix64 (Steele, Lea, Flood 2014,
    https://doi.org/10.1145/2660193.2660195), modulo 2**64; the factors are signed.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        numbers = (numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return numbers


def interpolation_of(name: str) -> InterpolationMode:
    """Return the interpolation mode of this name; a ConfigError if it is unknown."""
    modes = {
        "nearest": InterpolationMode.NEAREST,
        "bilinear": InterpolationMode.BILINEAR,
        "bicubic": InterpolationMode.BICUBIC,
    }
    ConfigError.raise_if(
        name not in modes,
        "transforms",
        "unknown interpolation",
        name,
        "nearest, bilinear or bicubic",
    )
    return modes[name]
