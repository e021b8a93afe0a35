"""ResNets for small images: the paper's CIFAR networks, and ImageNet's with another stem.

The stem keeps the resolution. The networks consist of torchvision's blocks and have its parameter
names, so weights move between `resnet18_small` and `torchvision.models.resnet18` wherever the
shapes agree (all but the stem and, at another width, the rest).
"""

from collections.abc import Sequence
from typing import Literal, final

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from samewise.recipes.models.activations import with_activation
from samewise.runner.errors import ConfigError

Shortcut = Literal["A", "B"]


@final
class SmallImageResNet(nn.Module):
    """Residual stages of basic blocks on a 3x3 stem of stride 1 without pooling.

    Source: He et al. 2015, Deep Residual Learning for Image Recognition, arXiv 1512.03385, section
    4.2. Takes float32[B, in_channels, H, W], returns logits float32[B, num_classes]. The first
    stage keeps the size, each further one halves it.

    Args:
        blocks: Basic blocks of each stage.
        widths: Channels of each stage.
        shortcut: Where the size changes, "A": subsampled and padded with zero channels, without
            parameters, as in the paper for CIFAR-10; "B": a 1x1 convolution with batch norm, as in
            torchvision.
        num_classes: Number of outputs, one for each class.
        in_channels: 3 for colour, 1 for grey.
        activation: The activation, a function of torch.nn.functional.
    """

    def __init__(
        self,
        *,
        blocks: Sequence[int],
        widths: Sequence[int],
        shortcut: Shortcut = "B",
        num_classes: int = 10,
        in_channels: int = 3,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        # Batch norm follows, which would remove a bias
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self._stages = [f"layer{number}" for number in range(1, len(blocks) + 1)]
        inputs = widths[0]
        for name, count, width in zip(self._stages, blocks, widths, strict=True):
            self.add_module(
                name,
                _stage(
                    inputs,
                    width,
                    count=count,
                    stride=1 if name == "layer1" else 2,
                    shortcut=shortcut,
                ),
            )
            inputs = width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        _initialise(self)
        if activation != "relu":
            with_activation(self, activation=activation)

    def forward(self, image: Tensor) -> Tensor:
        features = self.relu(self.bn1(self.conv1(image)))
        for name in self._stages:
            features = self.get_submodule(name)(features)
        return self.fc(self.avgpool(features).flatten(1))


@final
class PaddedShortcut(nn.Module):
    """Option A of the paper: float32[B, C, H, W] to float32[B, channels, H/stride, W/stride].

    The new channels are zero, half of them on each side.

    Args:
        inputs: C.
        channels: Number of output channels.
        stride: Step along height and width.
    """

    def __init__(self, inputs: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self._stride = stride
        self._before = (channels - inputs) // 2
        self._after = channels - inputs - self._before

    def forward(self, features: Tensor) -> Tensor:
        return F.pad(
            features[:, :, :: self._stride, :: self._stride],
            (0, 0, 0, 0, self._before, self._after),
        )


def resnet_cifar(
    *,
    depth: int = 20,
    width: int = 16,
    shortcut: Shortcut = "A",
    num_classes: int = 10,
    in_channels: int = 3,
    activation: str = "relu",
) -> SmallImageResNet:
    """Create the paper's CIFAR network: three stages of `width`, 2 `width` and 4 `width` channels.

    With the defaults it has 269,722 parameters; depth 32: 464,154; 44: 658,586; 56: 853,018; 110:
    1,727,962 (the paper rounds to 0.27, 0.46, 0.66, 0.85 and 1.7 million). Source: He et al. 2015,
    arXiv 1512.03385, section 4.2.

    Args:
        depth: 6 n + 2: 20, 32, 44, 56 and 110 are the paper's.
        width: Channels of the first stage.
        shortcut: "A" without parameters, as in the paper; "B" with 1x1 convolutions.
        num_classes: Number of outputs, one for each class.
        in_channels: 3 for colour, 1 for grey.
        activation: As in `SmallImageResNet`.

    Returns:
        The network, float32[B, in_channels, H, W] to float32[B, num_classes].

    Raises:
        ConfigError: The depth is not 6 n + 2.
    """
    ConfigError.raise_if(
        depth < 8 or (depth - 2) % 6,
        "model.depth",
        "is not a valid depth for a CIFAR ResNet",
        depth,
        "6 n + 2: 20, 32, 44, 56, 110, ...",
    )
    count = (depth - 2) // 6
    return SmallImageResNet(
        blocks=(count,) * 3,
        widths=(width, 2 * width, 4 * width),
        shortcut=shortcut,
        num_classes=num_classes,
        in_channels=in_channels,
        activation=activation,
    )


def resnet18_small(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 64,
    shortcut: Shortcut = "B",
    activation: str = "relu",
) -> SmallImageResNet:
    """Create ResNet-18 for images of 8 to 64 pixels: torchvision's except for the stem.

    At the default width, it has 11,173,962 parameters with ten classes.

    Args:
        num_classes: Number of outputs, one for each class.
        in_channels: 3 for colour, 1 for grey.
        width: Channels of the first stage; each further stage has twice as many as the one before.
        shortcut: As in `SmallImageResNet`.
        activation: As in `SmallImageResNet`.

    Returns:
        The network, float32[B, in_channels, H, W] to float32[B, num_classes].
    """
    return SmallImageResNet(
        blocks=(2, 2, 2, 2),
        widths=(width, 2 * width, 4 * width, 8 * width),
        shortcut=shortcut,
        num_classes=num_classes,
        in_channels=in_channels,
        activation=activation,
    )


def resnet34_small(
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    width: int = 64,
    shortcut: Shortcut = "B",
    activation: str = "relu",
) -> SmallImageResNet:
    """Create ResNet-34 for images of 8 to 64 pixels, as `resnet18_small`.

    Args:
        num_classes: Number of outputs, one for each class.
        in_channels: 3 for colour, 1 for grey.
        width: As in `resnet18_small`.
        shortcut: As in `SmallImageResNet`.
        activation: As in `SmallImageResNet`.

    Returns:
        The network, float32[B, in_channels, H, W] to float32[B, num_classes].
    """
    return SmallImageResNet(
        blocks=(3, 4, 6, 3),
        widths=(width, 2 * width, 4 * width, 8 * width),
        shortcut=shortcut,
        num_classes=num_classes,
        in_channels=in_channels,
        activation=activation,
    )


def small_image_stem(model: ResNet, *, in_channels: int = 3) -> ResNet:
    """Give a torchvision ResNet a 3x3 convolution of stride 1 without max-pooling as its stem.

    The model (any depth, bottlenecks, ResNeXt) is changed in place.

    Args:
        model: The ResNet.
        in_channels: Channels of the images.

    Returns:
        The changed ResNet.
    """
    model.conv1 = nn.Conv2d(in_channels, model.conv1.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue] (a module is a module)
    return model


def _stage(
    inputs: int, width: int, *, count: int, stride: int, shortcut: Shortcut
) -> nn.Sequential:
    change: nn.Module | None = None
    if stride != 1 or inputs != width:
        change = (
            PaddedShortcut(inputs, width, stride=stride)
            if shortcut == "A"
            else nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )
        )
    return nn.Sequential(
        BasicBlock(inputs, width, stride, change),
        *(BasicBlock(width, width) for _ in range(count - 1)),
    )


def _initialise(model: nn.Module) -> None:
    """Initialise as torchvision's ResNet: Kaiming's normal by outputs (arXiv 1502.01852).

    Batch norm starts as the identity.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
