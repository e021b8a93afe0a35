"""Converts bytes to the numbers that a model takes."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from samewise.datasets.transforms.images import ImageTransform, needs_floats
from samewise.runner.errors import ConfigError, Problem


@final
class ToFloat(ImageTransform):
    """uint8 in [0, 255], or uint16 in [0, 65535], to float32 in [0, 1].

    Floating-point images do not change.

    Raises:
        ConfigError: The images are other integers, whose range is unknown.
    """

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        # torchvision's arithmetic, without its checks
        if images.dtype is torch.uint8:
            return images.to(torch.float32).mul_(1.0 / 255)
        # Divided by the type's largest number, images that hold 0 to 255 would be almost black
        if not images.is_floating_point() and images.dtype not in (torch.uint16, torch.bool):
            raise ConfigError(
                Problem(
                    "transforms",
                    "images of this type have no known range",
                    str(images.dtype),
                    "uint8, uint16, or floats from 0 to 1",
                    "convert them where they are read, to uint8 or uint16, or to floats",
                )
            )
        return (
            images
            if images.is_floating_point()
            else functional.to_dtype_image(images, torch.float32, scale=True)
        )


@final
class Normalize(ImageTransform):
    """(image - mean) / std by channel, of float32[B, C, H, W] in [0, 1].

    Args:
        mean: Mean of each of the C channels.
        std: Standard deviation of each of the C channels.

    Raises:
        ConfigError: The numbers are not valid, or the images are not floating point or have other
            channels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, *, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        ConfigError.raise_if(
            len(mean) != len(std) or not len(mean) or any(value <= 0 for value in std),
            "transforms",
            "mean and std are not valid",
            {"mean": list(mean), "std": list(std)},
            "one of each for every channel, std greater than 0",
        )
        self.register_buffer(
            "mean", torch.tensor([float(value) for value in mean]).view(-1, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor([float(value) for value in std]).view(-1, 1, 1), persistent=False
        )

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        # Each look-up of a module's buffer costs as much as a tenth of the arithmetic
        mean, std = self.mean, self.std
        if needs_floats(images, self).shape[-3] != len(mean):
            is_turned = images.shape[-2] == len(mean)
            raise ConfigError(
                Problem(
                    "transforms",
                    f"Normalize has {len(mean)} channels, the images have {images.shape[-3]}",
                    hint="NumPy arrays are read as [height, width, channels]: return "
                    "torch.from_numpy(image)"
                    if is_turned
                    else "set dataset.mean and dataset.std",
                )
            )
        if mean.device != images.device:
            self.to(images.device)
            mean, std = self.mean, self.std
        return images.sub(mean).div_(std)
