"""Airbench's networks for images of 32x32 pixels, which reach an accuracy with few operations.

Sources: K. Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv 2404.00498, and
https://github.com/KellerJordan/cifar10-airbench, after D. Page
(https://myrtle.ai/learn/how-to-train-your-resnet/) and T. Balsam
(https://github.com/tysam-code/hlb-CIFAR10).
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from samewise.recipes.models.activations import activation_function, activation_module


@final
class Airbench(nn.Module):
    """Airbench's network: float32[B, in_channels, H, W] to logits float32[B, num_classes].

    Images have at least 16x16 pixels. A 2x2 convolution comes first, with twice as many channels as
    a patch has numbers; its weight is not trained: `initialise=whitening` sets it from training
    images. Blocks that halve the size follow, then the largest value of each channel, and a linear
    layer whose output is divided by the number of channels.

    Args:
        widths: Channels of each block. (64, 256, 256) is airbench94's, (128, 384, 384)
            airbench95's, (128, 384, 512) airbench96's.
        convolutions: 3x3 convolutions of each block: 2; or 3, the last two of which are a residual
            branch (airbench96).
        num_classes: Number of outputs, one for each class.
        in_channels: 3 for colour, 1 for grey.
        activation: The activation, a function of torch.nn.functional.
    """

    def __init__(
        self,
        *,
        widths: Sequence[int] = (64, 256, 256),
        convolutions: int = 2,
        num_classes: int = 10,
        in_channels: int = 3,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self._activate = activation_function(activation)
        whitened = 2 * in_channels * 2 * 2
        self.whiten = nn.Conv2d(in_channels, whitened, 2)
        self.whiten.weight.requires_grad_(False)
        inputs = (whitened, *widths)
        self.blocks = nn.Sequential(
            *(
                _Block(before, width, convolutions, activation)
                for before, width in zip(inputs, widths, strict=False)
            )
        )
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        with torch.no_grad():
            # As in airbench's initialisation
            self.head.weight /= self.head.weight.std()

    def forward(self, image: Tensor) -> Tensor:
        features = self.blocks(self._activate(self.whiten(image))).amax((2, 3))
        return self.head(features) / features.shape[1]


class _Block(nn.Module):
    """A block: float[B, inputs, H, W] to float[B, width, H // 2, W // 2]."""

    def __init__(self, inputs: int, width: int, convolutions: int, activation: str) -> None:
        super().__init__()
        self.conv1, self.pool, self.norm1 = (
            _convolution(inputs, width),
            nn.MaxPool2d(2),
            _norm(width),
        )
        self.conv2, self.norm2 = _convolution(width, width), _norm(width)
        self.residual = convolutions > 2
        if self.residual:
            self.conv3, self.norm3 = _convolution(width, width), _norm(width)
        self.activation = activation_module(activation)

    def forward(self, features: Tensor) -> Tensor:
        entry = self.activation(self.norm1(self.pool(self.conv1(features))))
        output = self.norm2(self.conv2(entry))
        if self.residual:
            output = self.norm3(self.conv3(self.activation(output))) + entry
        return self.activation(output)


def _convolution(inputs: int, width: int) -> nn.Conv2d:
    """Return a convolution whose first outputs are its inputs, as far as possible."""
    layer = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])
    return layer


def _norm(width: int) -> nn.BatchNorm2d:
    """Return batch norm without a trained scale; its statistics adapt faster than torch's."""
    # airbench's 0.6 is the share of the old statistics, torch's momentum that of the new ones
    layer = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer
