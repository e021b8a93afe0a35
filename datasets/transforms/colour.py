"""Colour operations on uint8[B, C, H, W], C 1 or 3, as torchvision (and PIL) define them.

Each image has its own strength. Saturation and sharpness may differ from torchvision's by one
level, in fewer than 1 of 100 values, where rounding decides.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d
from torchvision.transforms.v2 import functional

from samewise.datasets.transforms.images import (
    ImageTransform,
    chance,
    interval,
    needs_bytes,
    needs_colours,
    per_sample,
    uniform,
)
from samewise.runner.interfaces import Batch

Operation = Callable[[Tensor, Tensor], Tensor]
"""Maps uint8[n, C, H, W] and strengths, float64[n] on the CPU, to changed images."""


def apply_operations(
    images: Tensor, operation_numbers: Tensor, strength: Tensor, operations: Sequence[Operation]
) -> Tensor:
    """Apply each image's operation, grouped by operation.

    There are at most as many calls as operations, whatever B.

    Args:
        images: uint8[B, C, H, W].
        operation_numbers: int64[B] on the CPU, the number of each image's operation.
        strength: float64[B] on the CPU.
        operations: The operations by number.

    Returns:
        uint8[B, C, H, W].
    """
    order = operation_numbers.argsort(stable=True)
    counts = operation_numbers.bincount(minlength=len(operations)).tolist()
    sorted_images = images.index_select(0, order.to(images.device, non_blocking=True))
    pieces = zip(
        operations, sorted_images.split(counts), strength[order].split(counts), strict=True
    )
    changed = torch.cat(
        [operation(piece, strengths) for operation, piece, strengths in pieces if len(piece)]
    )
    return changed.index_select(0, order.argsort().to(images.device, non_blocking=True))


def identity(images: Tensor, strength: Tensor) -> Tensor:
    """Return the images unchanged."""
    return images


def brightness(images: Tensor, strength: Tensor) -> Tensor:
    """Scale the brightness; strength 0: black, 1: unchanged."""
    return images.mul(per_sample(strength, images, torch.float32)).clamp_(0, 255).to(torch.uint8)


def contrast(images: Tensor, strength: Tensor) -> Tensor:
    """Scale the contrast; strength 0: the mean grey, 1: unchanged."""
    return _blend(images, _grey(images).mean(dim=(1, 2, 3), keepdim=True), strength)


def saturation(images: Tensor, strength: Tensor) -> Tensor:
    """Scale the saturation; strength 0: grey, 1: unchanged."""
    return images if images.shape[1] == 1 else _blend(images, _grey(images), strength)


def sharpness(images: Tensor, strength: Tensor) -> Tensor:
    """Scale the sharpness; strength 0: smoothed, 1: unchanged.

    The smoothing is 3x3, the centre weighted five times as much as a neighbour; the one-pixel
    border stays.
    """
    if min(images.shape[-2:]) <= 2:
        return images
    floats = images.to(torch.float32)
    inner = floats[..., 1:-1, 1:-1]
    # On CUDA, a convolution's precision would depend on the TF32 setting. Thirteenths never fall on
    # a half, so rounding is exact.
    smooth = avg_pool2d(floats, 3, stride=1).mul_(9).add_(inner, alpha=4).div_(13).round_()
    inner.add_(smooth.sub_(inner).mul_(per_sample(1.0 - strength, images, torch.float32)))
    return floats.clamp_(0, 255).to(torch.uint8)


def posterize(images: Tensor, strength: Tensor) -> Tensor:
    """Keep only the `strength` highest bits."""
    bits = strength.long()
    return images & per_sample((2**bits - 1) * 2 ** (8 - bits), images, torch.uint8)


def solarize(images: Tensor, strength: Tensor) -> Tensor:
    """Invert values from 255 * strength on."""
    return torch.where(
        images >= per_sample(255.0 * strength, images, torch.float32),
        functional.invert(images),
        images,
    )


def autocontrast(images: Tensor, strength: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    return functional.autocontrast(images)


def equalize(images: Tensor, strength: Tensor) -> Tensor:
    """Equalise each channel's histogram."""
    return functional.equalize(images)


@final
class ColorJitter(ImageTransform):
    """Brightness, contrast and saturation changed by random factors in a random order.

    Takes uint8[B, C, H, W], C 1 or 3. Choices: `order` int64[B, 3], the numbers of the three
    operations in order; `factor` float64[B, 3], by the operation's number.

    Args:
        brightness: Factors are uniform in [1 - brightness, 1 + brightness], not below 0; 0:
            unchanged.
        contrast: Factors are uniform in [1 - contrast, 1 + contrast], not below 0; 0: unchanged.
        saturation: Factors are uniform in [1 - saturation, 1 + saturation], not below 0; 0:
            unchanged.

    Raises:
        ConfigError: An amount is negative.
    """

    _operations = (brightness, contrast, saturation)

    def __init__(
        self, *, brightness: float = 0.0, contrast: float = 0.0, saturation: float = 0.0
    ) -> None:
        super().__init__()
        amounts = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        self.intervals = [
            interval(name, (max(0.0, 1 - amount), 1 + amount)) for name, amount in amounts.items()
        ]

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        factor = torch.stack([uniform(size, *ends) for ends in self.intervals], dim=1)
        return {"order": torch.rand(size, 3).argsort(dim=1), "factor": factor}

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        images = needs_bytes(images, self)
        for operation in choices["order"].unbind(1):
            images = apply_operations(
                images,
                operation,
                choices["factor"].gather(1, operation[:, None])[:, 0],
                self._operations,
            )
        return images


@final
class RandomGrayscale(ImageTransform):
    """All three channels set to the grey value, with probability `p`.

    Takes images [B, C, H, W], C 1 or 3. Choices: `grey`, bool[B].

    Args:
        p: Probability for each image.

    Raises:
        ConfigError: `p` is not a probability.
    """

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.p = chance("p", p)

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        return {"grey": torch.rand(size) < self.p}

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        if needs_colours(images, self).shape[1] == 1:
            return images
        return torch.where(
            per_sample(choices["grey"], images),
            functional.rgb_to_grayscale(images, num_output_channels=3),
            images,
        )


def _grey(images: Tensor) -> Tensor:
    """Return float32[n, 1, H, W]: whole numbers, weighted as in ITU-R BT.601."""
    if images.shape[1] == 1:
        return images.to(torch.float32)
    red, green, blue = images.split(1, dim=1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def _blend(images: Tensor, other: Tensor, strength: Tensor) -> Tensor:
    share_of_image, share_of_other = (
        per_sample(share, images, torch.float32) for share in (strength, 1.0 - strength)
    )
    return images.mul(share_of_image).add_(other * share_of_other).clamp_(0, 255).to(torch.uint8)
