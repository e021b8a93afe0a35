"""Affine maps with separate parameters for each image: rotation, shift, scale, shear."""

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

    Takes uint8 or float32[B, C, H, W]. Choices, float64[B]: `angle` in degrees, `x` and `y` in
    pixels, `scale`, `shear` in degrees.

    Args:
        degrees: Largest rotation: the angle is uniform in [-degrees, degrees], clockwise.
        translate: Largest shift, as shares of (width, height); shifts are whole pixels.
        scale: Interval of magnifications.
        shear: Largest shear along x in degrees, uniform in [-shear, shear].
        interpolation: "bilinear" or "nearest".
        fill: Value outside the image, on the image's own scale.

    Raises:
        ConfigError: `scale` is not a valid interval, or the interpolation is unknown.
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
        return warp(
            images,
            inverse_matrices(angle=angle, x=x, y=y, scale=scale, shear=shear),
            interpolation=self.interpolation,
            fill=self.fill,
        )


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
    """Return float64[B, 2, 3] from output to input pixels, relative to the image's centre.

    The map is M = T C R(angle) S(scale) SHy SHx C^-1 in torchvision's convention; the matrices are
    its inverse.

    Args:
        angle: float64[B], rotation in degrees, clockwise; None: no rotation (likewise below).
        x: float64[B], shift along x in pixels.
        y: float64[B], shift along y in pixels.
        scale: float64[B], magnification.
        shear: float64[B], shear along x in degrees.
        shear_y: float64[B], shear along y in degrees.
        centre: The fixed point (x, y) in pixels.
    """
    example = next(value for value in (angle, x, y, scale, shear, shear_y) if value is not None)
    zeros = torch.zeros_like(example, dtype=torch.float64)
    rotation, sx, sy = (
        torch.deg2rad(zeros if value is None else value) for value in (angle, shear, shear_y)
    )
    x, y = (zeros if value is None else value for value in (x, y))
    scale = zeros + 1 if scale is None else scale
    a = torch.cos(rotation - sy) / torch.cos(sy)
    b = -(a * torch.tan(sx) + torch.sin(rotation))
    c = torch.sin(rotation - sy) / torch.cos(sy)
    d = torch.cos(rotation) - c * torch.tan(sx)
    # The inverse matrix: without the scale, the determinant is 1
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
    """Sample each image [B, C, H, W] through its matrix [B, 2, 3], which is on the CPU.

    Border pixels are blended with `fill` by their coverage; torchvision, with a fill and bilinear
    interpolation, applies the coverage twice.

    Returns:
        Images of the same shape and dtype, with `fill` outside.
    """
    height, width = images.shape[-2:]
    # grid_sample's coordinates run from -1 to 1
    halves = torch.tensor([0.5 * width, 0.5 * height]).view(1, 2, 1)
    # [B, 2, 3, 1, 1]
    matrix = (matrices.to(torch.float32) / halves).to(images.device, non_blocking=True)[
        :, :, :, None, None
    ]
    x = torch.linspace((1 - width) * 0.5, (width - 1) * 0.5, width, device=images.device)
    y = torch.linspace((1 - height) * 0.5, (height - 1) * 0.5, height, device=images.device)[
        :, None
    ]
    # [B, 2, H, W], element by element: the rounding of a matrix product depends on the batch's size
    grid = (matrix[:, :, 0] * x + matrix[:, :, 1] * y) + matrix[:, :, 2]
    floats = images if images.is_floating_point() else images.to(torch.float32)
    # grid_sample pads with zeros: the fill value is shifted to zero
    if fill:
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
