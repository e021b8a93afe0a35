"""Works around faults of torch's libraries."""

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def work_around(model: nn.Module, device: torch.device) -> None:
    """Avoid known faults of torch's libraries in a model on this device.

    Both are oneDNN's, seen in torch 2.14.1.

    - The gradient of the weights of a strided 1 x 1 convolution in channels_last writes beyond its
      memory where there are fewer input channels than a vector holds (8 with AVX2, 16 with
      AVX-512): the process crashes, or the gradient is wrong (oneDNN issue 6035).
    - In bfloat16 (seen with AVX-512), a strided convolution, or one over volumes, of an input about
      as small as its kernel reads memory that was never written: output or gradients may be any
      number, or NaN. It is computed in float32.
    """
    if device.type == "cpu":
        for module in model.modules():
            if (
                type(module) in _CONVOLUTIONS
                and isinstance(module, _CONVOLUTIONS)
                and (max(module.stride) > 1 or isinstance(module, nn.Conv3d))
            ):
                module.forward = MethodType(_convolve, module)


def _convolve(self: nn.Conv1d | nn.Conv2d | nn.Conv3d, input: Tensor) -> Tensor:
    autocasts = (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    )
    if (autocasts or input.dtype is torch.bfloat16) and _is_small(self, input):
        with torch.autocast("cpu", enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return _convolve_in_bounds(self, input.float(), self.weight.float(), bias).bfloat16()
    return _convolve_in_bounds(self, input, self.weight, self.bias)


def _is_small(self: nn.Conv1d | nn.Conv2d | nn.Conv3d, input: Tensor) -> bool:
    of_volumes = type(self) is nn.Conv3d
    # "same" adds so much in all; for "valid" it only takes more inputs to be small
    same = [
        dilation * (kernel - 1)
        for dilation, kernel in zip(self.dilation, self.kernel_size, strict=True)
    ]
    padding = self.padding if not isinstance(self.padding, str) else same
    sizes = zip(
        input.shape[-len(self.kernel_size) :],
        self.kernel_size,
        self.stride,
        self.dilation,
        padding,
        strict=True,
    )
    return any(
        (stride > 1 or of_volumes) and size <= dilation * (kernel - 1) + 1 + padded
        for size, kernel, stride, dilation, padded in sizes
    )


def _convolve_in_bounds(
    self: nn.Conv1d | nn.Conv2d | nn.Conv3d, input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    pointwise = (
        type(self) is nn.Conv2d
        and set(self.kernel_size) == {1}
        and self.padding_mode == "zeros"
        and self.padding in ((0, 0), "valid")
    )
    if (
        not pointwise
        or max(self.stride) == 1
        # An AVX-512 vector holds 16 float32 numbers
        or weight.shape[1] >= 16
        or (input.is_contiguous() and weight.stride(-1) == 1)
    ):
        return self._conv_forward(input, weight, bias)  # pyright: ignore[reportPrivateUsage]
    rows, columns = self.stride
    # The same products, without a stride: only each stride's first pixel counts
    return conv2d(input[..., ::rows, ::columns], weight, bias, groups=self.groups)
