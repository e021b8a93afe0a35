"""SSD's photometric distortion, with separate choices for each image.

Source: Liu et al. 2015, SSD: Single Shot MultiBox Detector, arXiv 1512.02325, section 2.2.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from samewise.datasets.transforms import colour
from samewise.datasets.transforms.images import (
    ImageTransform,
    chance,
    interval,
    needs_bytes,
    uniform,
)
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch


@final
class RandomPhotometricDistort(ImageTransform):
    """Brightness, contrast, saturation, hue and channel order, each changed with probability `p`.

    Contrast changes before or after saturation and hue. Takes uint8[B, 3, H, W], as torchvision's
    transform of this name. Choices: `brightness`, `contrast`, `saturation`, `hue` float64[B] (1, 1,
    1 and 0: unchanged), `contrast_first` bool[B], `channels` int64[B, 3].

    Args:
        brightness, contrast, saturation: Interval of factors.
        hue: Interval of shifts, as shares of the colour circle, within [-0.5, 0.5].
        p: Probability of each change.

    Raises:
        ConfigError: An interval or the probability is not valid, or the images do not have 3
            channels.
    """

    def __init__(
        self,
        *,
        brightness: Sequence[float] = (0.875, 1.125),
        contrast: Sequence[float] = (0.5, 1.5),
        saturation: Sequence[float] = (0.5, 1.5),
        hue: Sequence[float] = (-0.05, 0.05),
        p: float = 0.5,
    ) -> None:
        super().__init__()
        self.factors = {
            "brightness": interval("brightness", brightness, low=0.0),
            "contrast": interval("contrast", contrast, low=0.0),
            "saturation": interval("saturation", saturation, low=0.0),
        }
        self.hue = interval("hue", hue, low=-0.5)
        ConfigError.raise_if(
            self.hue[1] > 0.5,
            "transforms",
            "hue is not a valid interval within [-0.5, 0.5]",
            list(hue),
        )
        self.p = chance("p", p)

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        choices = {
            name: torch.where(self._choose(size), uniform(size, *ends), 1.0)
            for name, ends in self.factors.items()
        }
        choices["hue"] = torch.where(self._choose(size), uniform(size, *self.hue), 0.0)
        choices["contrast_first"] = torch.rand(size) < 0.5
        shuffled = torch.rand(size, 3).argsort(dim=1)
        choices["channels"] = torch.where(self._choose(size)[:, None], shuffled, torch.arange(3))
        return choices

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        if needs_bytes(images, self).shape[1] != 3:
            raise ConfigError(
                Problem(
                    "transforms",
                    "RandomPhotometricDistort works on images with 3 channels",
                    images.shape[1],
                )
            )
        contrast, is_before = choices["contrast"], choices["contrast_first"]
        images = colour.brightness(images, choices["brightness"])
        # Every image goes through both places; a factor of 1 changes nothing
        images = colour.contrast(images, torch.where(is_before, contrast, 1.0))
        images = colour.saturation(images, choices["saturation"])
        images = _shift(images, choices["hue"])
        images = colour.contrast(images, torch.where(is_before, 1.0, contrast))
        channels = choices["channels"].to(images.device, non_blocking=True)
        return images.gather(1, channels[:, :, None, None].expand_as(images))

    def _choose(self, size: int) -> Tensor:
        return torch.rand(size) < self.p


def _shift(images: Tensor, hue: Tensor) -> Tensor:
    """Shift the images' hues."""
    if not hue.any():
        return images
    # torchvision's operation takes one number for all images
    return torch.stack(
        [
            functional.adjust_hue(image, shift) if shift else image
            for image, shift in zip(images, hue.tolist(), strict=True)
        ]
    )
