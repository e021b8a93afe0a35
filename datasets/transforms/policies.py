"""RandAugment and TrivialAugmentWide: operations and strengths chosen for each image.

They are applied to uint8[B, C, H, W], one operation at a time.
"""

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from samewise.datasets.transforms import colour
from samewise.datasets.transforms.affine import inverse_matrices, warp
from samewise.datasets.transforms.colour import Operation, apply_operations
from samewise.datasets.transforms.geometry import interpolation_of
from samewise.datasets.transforms.images import ImageTransform, image_size, needs_bytes
from samewise.runner.errors import ConfigError, require_at_least
from samewise.runner.interfaces import Batch

NAMES = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color",
    "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
"""Operations in torchvision's order; choices are indices into it."""

SIGNED = torch.tensor([1 <= number <= 9 for number in range(len(NAMES))])
"""bool[14]: operations whose magnitude is negated half of the time, ShearX to Sharpness."""


class _Policy(ImageTransform):
    """Operations one after the other.

    Choices: `operation` int64[B, n] into `NAMES`, `magnitude` float64[B, n], signed.

    Args:
        bins: Number of steps that divide the range of each magnitude.
        interpolation: Interpolation of the geometric operations: "nearest" or "bilinear".
        fill: Value outside the image.

    Raises:
        ConfigError: A number or the interpolation is not valid.
    """

    moves_pixels = True

    def __init__(
        self, *, bins: int = 31, interpolation: str = "nearest", fill: float = 0.0
    ) -> None:
        super().__init__()
        require_at_least({"transforms.num_magnitude_bins": bins}, least=2)
        self.bins = bins
        self._operations = _operations(interpolation_of(interpolation).value, float(fill))

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        images = needs_bytes(images, self)
        for operation, magnitude in zip(
            choices["operation"].unbind(1), choices["magnitude"].unbind(1), strict=True
        ):
            images = apply_operations(images, operation, magnitude, self._operations)
        return images

    def _draw_magnitudes(self, operation: Tensor, bins: Tensor, table: Tensor) -> dict[str, Tensor]:
        magnitude = table[operation, bins]
        negative = (torch.rand(operation.shape) < 0.5) & SIGNED[operation]
        return {"operation": operation, "magnitude": torch.where(negative, -magnitude, magnitude)}


@final
class TrivialAugmentWide(_Policy):
    """One operation at any strength.

    Source: Müller and Hutter 2021, TrivialAugment, arXiv 2103.10158. Takes uint8[B, C, H, W], C 1
    or 3. Choices: `operation` int64[B, 1], `magnitude` float64[B, 1].

    Args:
        bins: Number of steps that divide the range of each magnitude.
        interpolation: Interpolation of the geometric operations: "nearest" or "bilinear".
        fill: Value outside the image.
    """

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        operation, bins = torch.randint(len(NAMES), (size, 1)), torch.randint(self.bins, (size, 1))
        return self._draw_magnitudes(
            operation,
            bins,
            magnitudes(
                self.bins, shear=0.99, shift=(32.0, 32.0), degrees=135.0, strength=0.99, bits=6
            ),
        )


@final
class RandAugment(_Policy):
    """`num_ops` operations, all at one strength.

    Source: Cubuk et al. 2019, RandAugment, arXiv 1909.13719. Takes uint8[B, C, H, W], C 1 or 3.
    Choices: `operation` int64[B, num_ops], `magnitude` float64[B, num_ops].

    Args:
        num_ops: Number of operations, one after the other.
        magnitude: The strength: a bin from 0 to bins - 1.
        bins: Number of steps that divide the range of each magnitude.
        interpolation: Interpolation of the geometric operations: "nearest" or "bilinear".
        fill: Value outside the image.

    Raises:
        ConfigError: The magnitude is not a valid bin.
    """

    def __init__(
        self,
        *,
        num_ops: int = 2,
        magnitude: int = 9,
        bins: int = 31,
        interpolation: str = "nearest",
        fill: float = 0.0,
    ) -> None:
        super().__init__(bins=bins, interpolation=interpolation, fill=fill)
        ConfigError.raise_if(
            not 0 <= magnitude < bins,
            "transforms",
            "magnitude is not a valid bin",
            magnitude,
            f"0 to {bins - 1}",
        )
        self.num_ops, self.magnitude = num_ops, magnitude

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        height, width = image_size(batch)
        operation = torch.randint(len(NAMES), (size, self.num_ops))
        shift = (150.0 / 331.0 * width, 150.0 / 331.0 * height)
        table = magnitudes(self.bins, shear=0.3, shift=shift, degrees=30.0, strength=0.9, bits=4)
        return self._draw_magnitudes(operation, torch.full_like(operation, self.magnitude), table)


def magnitudes(
    bins: int,
    *,
    shear: float,
    shift: tuple[float, float],
    degrees: float,
    strength: float,
    bits: int,
) -> Tensor:
    """Return float64[14, bins]: the magnitude of each operation in each bin.

    Args:
        bins: Number of bins.
        shear: Largest shear, as a tangent.
        shift: Largest shift along x and y in pixels.
        degrees: Largest rotation in degrees.
        strength: Largest difference of a colour factor from 1.
        bits: Most bits that Posterize removes.
    """
    largest = [0.0, shear, shear, *shift, degrees, strength, strength, strength, strength]
    # Posterize keeps from 8 bits down to 8 - `bits`; Solarize's threshold falls from 1 to 0; the
    # last two operations have no magnitude
    table = [
        *(torch.linspace(0.0, end, bins) for end in largest),
        (8 - torch.arange(bins) / ((bins - 1) / bits)).round(),
        torch.linspace(1.0, 0.0, bins),
        *[torch.zeros(bins)] * 2,
    ]
    return torch.stack(table).double()


def _operations(interpolation: str, fill: float) -> Sequence[Operation]:
    """Return the functions of images and magnitudes, by the operation's number."""
    moved = partial(_shift_or_shear, interpolation=interpolation, fill=fill)
    geometric = [partial(moved, kind) for kind in ("shear", "shear_y", "x", "y", "angle")]
    factors = [
        partial(_scale_by_factor, operation)
        for operation in (colour.brightness, colour.saturation, colour.contrast, colour.sharpness)
    ]
    return (
        colour.identity,
        *geometric,
        *factors,
        colour.posterize,
        colour.solarize,
        colour.autocontrast,
        colour.equalize,
    )


def _shift_or_shear(
    kind: str, images: Tensor, magnitude: Tensor, *, interpolation: str, fill: float
) -> Tensor:
    # Shifts are whole pixels, rotations counter-clockwise. Shears are about the upper left corner,
    # and their magnitude is a tangent.
    amount, centre = magnitude.trunc() if kind in ("x", "y") else -magnitude, (0.0, 0.0)
    if kind.startswith("shear"):
        amount = torch.rad2deg(magnitude.atan())
        centre = (-0.5 * images.shape[-1], -0.5 * images.shape[-2])
    return warp(
        images,
        inverse_matrices(**{kind: amount}, centre=centre),
        interpolation=interpolation,
        fill=fill,
    )


def _scale_by_factor(operation: Operation, images: Tensor, magnitude: Tensor) -> Tensor:
    return operation(images, 1.0 + magnitude)
