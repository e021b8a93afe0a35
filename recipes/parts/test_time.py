"""Test-time augmentation: the mean of a model's outputs for several versions of an image."""

from collections.abc import Sequence
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from samewise.runner.errors import ConfigError, nearest

KINDS: Final = ("none", "flip", "flip_and_translate")


def check_kind(kind: str, path: str) -> str:
    """Return a kind of test-time augmentation; a ConfigError if it is unknown."""
    ConfigError.raise_if(
        kind not in KINDS,
        path,
        "is not a valid kind of test-time augmentation",
        kind,
        ", ".join(KINDS),
        nearest(str(kind), KINDS),
    )
    return kind


def views(images: Tensor, kind: str) -> Sequence[tuple[float, Tensor]]:
    """Return the versions of images, the originals first, with their weights in the mean.

    Source: K. Jordan 2024, arXiv 2404.00498, section 3.5.

    Args:
        images: float[B, C, H, W], or clips [B, C, T, H, W].
        kind: `none`; `flip`: also mirrored from left to right; `flip_and_translate`: also shifted
            by a pixel up and left, and down and right, with mirrored edges. The shifted versions
            weigh as much as the unshifted ones.
    """
    if kind == "none":
        return [(1.0, images)]
    flipped = [images, images.flip(-1)]
    if kind == "flip":
        return [(0.5, x) for x in flipped]
    height, width = images.shape[-2:]
    # torch's reflection padding does not take the five dimensions of clips
    padded = F.pad(images.flatten(0, -4), (1, 1, 1, 1), mode="reflect").unflatten(
        0, images.shape[:-3]
    )
    shifted = [padded[..., down : down + height, down : down + width] for down in (0, 2)]
    return [
        *((0.25, x) for x in flipped),
        *((0.125, x) for half in shifted for x in (half, half.flip(-1))),
    ]
