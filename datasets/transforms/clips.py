"""Transforms for clips [B, T, C, H, W], which the transforms of images also accept."""

from typing import final

from torch import Tensor

from samewise.datasets.transforms.images import map_images
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch, BatchTransform


@final
class ChannelsBeforeTime(BatchTransform):
    """`image` [B, T, C, H, W] to [B, C, T, H, W], the layout of torchvision's video models.

    3-d convolutions expect it too. It is the last transform.

    Raises:
        ConfigError: The images are not clips of one size.
    """

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        if not isinstance(batch["image"], Tensor) or batch["image"].dim() != 5:
            raise ConfigError(
                Problem(
                    "transforms",
                    "ChannelsBeforeTime requires clips",
                    list(batch["image"].shape)
                    if isinstance(batch["image"], Tensor)
                    else "clips that differ in size",
                    "[batch, time, channels, height, width]",
                    "transforms=images is for images",
                )
            )
        return map_images(batch, ("image",), lambda clips: clips.movedim(2, 1).contiguous())
