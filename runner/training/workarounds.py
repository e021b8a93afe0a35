"""What torch's libraries compute wrongly, computed in another way."""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d


def work_around(model: nn.Module, device: torch.device) -> None:
    """Have a model compute on this device without the known faults of torch's libraries.

    oneDNN's gradient of the weights of a strided 1 x 1 convolution in channels_last writes beyond its memory where there are fewer input channels than a
    vector holds (8 with AVX2, 16 with AVX-512): the process crashes, or the gradient is wrong (oneDNN issue 6035; seen in torch 2.14.1).
    """
    if device.type == "cpu":
        for module in model.modules():
            if type(module) is nn.Conv2d and set(module.kernel_size) == {1} and max(module.stride) > 1 and module.in_channels // module.groups < 16:
                module.forward = MethodType(_strided_pointwise, module)


def _strided_pointwise(self: nn.Conv2d, input: Tensor) -> Tensor:
    if (input.is_contiguous() and self.weight.stride(-1) == 1) or self.padding_mode != "zeros" or self.padding not in ((0, 0), "valid"):
        return nn.Conv2d.forward(self, input)
    rows, columns = self.stride
    return conv2d(input[..., ::rows, ::columns], self.weight, self.bias, groups=self.groups)
