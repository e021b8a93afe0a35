"""Affine maps with separate parameters for each image: rotation, shift, scale, shear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from samewise.datasets.transforms.geometry import interpolation_of
from samewise.datasets.transforms.images import ImageTransform, image_size, interval, uniform
from samewise.runner.interfaces import Batch


@final
class RandomAffine(ImageTransform):
    """Rotation, shift, scale and shear about the image's centre.

    Choices, float64[B]: `angle`, `x`, `y`, `scale`, `shear`.

    Args:
        degrees: Rotation, clockwise, from -degrees to degrees.
        translate: Largest shift, as shares of (width, height); whole pixels.
        scale: The interval of magnifications.
        shear: Shear along x, from -shear to shear degrees.
        interpolation: bilinear or nearest.
        fill: The value outside the image, in its own scale.
    """

    moves_pixels = True

    def __init__(
        self,
        degrees: float = 0.0,
        *,
        translate: Sequence[float] = (0.0, 0.0),
        scale: Sequence[float] = (1.0, 1.0),
        shear: float = 0.0,
        interpolation: str = "bilinear",
        fill: float = 0.0,
    ) -> None:
        super().__init__()
        self.degrees, self.shear, self.fill = float(degrees), float(shear), float(fill)
        self.translate, self.scale = tuple(translate), interval("scale", scale, low=1e-9)
        self.interpolation = interpolation_of(interpolation).value

    def draw(self, batch: Batch, size: int) -> dict[str, Tensor]:
        height, width = image_size(batch)
        return {
            "angle": uniform(size, -self.degrees, self.degrees),
            "x": (uniform(size, -1, 1) * self.translate[0] * width).round(),
            "y": (uniform(size, -1, 1) * self.translate[1] * height).round(),
            "scale": uniform(size, *self.scale),
            "shear": uniform(size, -self.shear, self.shear),
        }

    def change(self, images: Tensor, choices: dict[str, Tensor]) -> Tensor:
        angle, x, y, scale, shear = (
            choices[name] for name in ("angle", "x", "y", "scale", "shear")
        )
        matrices = inverse_matrices(angle=angle, x=x, y=y, scale=scale, shear=shear)
        return warp(images, matrices, interpolation=self.interpolation, fill=self.fill)


def inverse_matrices(
    *,
    angle: Tensor | None = None,
    x: Tensor | None = None,
    y: Tensor | None = None,
    scale: Tensor | None = None,
    shear: Tensor | None = None,
    shear_y: Tensor | None = None,
    centre: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """float64[B, 2, 3], from output to input pixels, both relative to the image's centre.

    The map is M = T C R(angle) S(scale) SHy SHx C^-1 in torchvision's convention (angles in
    degrees, clockwise); this is its inverse. Arguments are float64[B], None where nothing happens;
    `centre` is the fixed point.
    """
    given = next(value for value in (angle, x, y, scale, shear, shear_y) if value is not None)
    nothing = torch.zeros_like(given, dtype=torch.float64)
    rotation, sx, sy = (
        torch.deg2rad(nothing if value is None else value) for value in (angle, shear, shear_y)
    )
    x, y = (nothing if value is None else value for value in (x, y))
    scale = nothing + 1 if scale is None else scale
    a = torch.cos(rotation - sy) / torch.cos(sy)
    b = -(a * torch.tan(sx) + torch.sin(rotation))
    c = torch.sin(rotation - sy) / torch.cos(sy)
    d = torch.cos(rotation) - c * torch.tan(sx)
    # The inverse: the determinant without the scale is 1
    a, b, c, d = (
        d / scale,
        -b / scale,
        -c / scale,
        a / scale,
    )
    shift_x = centre[0] - a * (centre[0] + x) - b * (centre[1] + y)
    shift_y = centre[1] - c * (centre[0] + x) - d * (centre[1] + y)
    return torch.stack([a, b, shift_x, c, d, shift_y], dim=1).view(-1, 2, 3)


def warp(
    images: Tensor, matrices: Tensor, *, interpolation: str = "nearest", fill: float = 0.0
) -> Tensor:
    """Each image [B, C, H, W] sampled through its matrix [B, 2, 3] (on the CPU).

    The same dtype, `fill` outside.

    Pixels at the border are blended with `fill` by their coverage; torchvision, given a fill and
    bilinear, weighs them by it twice. The grid is computed element by element rather than as a
    matrix product, whose rounding depends on the batch's size.
    """
    height, width = images.shape[-2:]
    halves = torch.tensor([0.5 * width, 0.5 * height]).view(1, 2, 1)
    # [B, 2, 3, 1, 1]
    matrix = (matrices.to(torch.float32) / halves).to(images.device, non_blocking=True)[
        :, :, :, None, None
    ]
    x = torch.linspace((1 - width) * 0.5, (width - 1) * 0.5, width, device=images.device)
    y = torch.linspace((1 - height) * 0.5, (height - 1) * 0.5, height, device=images.device)[
        :, None
    ]
    grid = (matrix[:, :, 0] * x + matrix[:, :, 1] * y) + matrix[:, :, 2]  # [B, 2, H, W]
    floats = images if images.is_floating_point() else images.to(torch.float32)
    if fill:  # outside is zero to grid_sample: so make zero the value wanted outside
        floats = floats - fill
    moved = grid_sample(
        floats,
        grid.permute(0, 2, 3, 1).to(floats.dtype),
        mode=interpolation,
        padding_mode="zeros",
        align_corners=False,
    )
    if fill:
        moved = moved + fill
    return moved if images.is_floating_point() else moved.round_().to(images.dtype)
