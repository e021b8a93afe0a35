"""A small vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PatchTransformer(nn.Module):
    """Patches, transformer layers, the mean of all patches: float32[B, C, H, W] to [B, outputs].

    Args:
        channels: Of the images.
        image_size: Height and width in pixels.
        outputs: Number of classes.
        patch: Height and width of a patch.
        width: Features of a patch.
        depth: Number of layers.
    """

    def __init__(
        self,
        *,
        channels: int,
        image_size: int,
        outputs: int,
        patch: int,
        width: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros((image_size // patch) ** 2, width))
        layers = list[nn.Module]()
        for _ in range(depth):
            layers += [nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, images: Tensor) -> Tensor:
        features = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layers(features).mean(dim=1))
