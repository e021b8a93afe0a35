"""A small convolutional network for small images."""

from __future__ import annotations

from torch import Tensor, nn


class SmallNet(nn.Module):
    """Two convolutions and a linear layer: float32[B, channels, H, W] to float32[B, outputs].

    Args:
        channels: Of the images.
        outputs: Number of classes.
        width: Channels of the first convolution.
    """

    def __init__(self, *, channels: int, outputs: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))
