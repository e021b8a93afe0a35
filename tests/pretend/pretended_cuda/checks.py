"""What CUDA would refuse to compute."""

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from pretended_cuda.tensor import DeviceError, PretendedTensor

INDEXING: Final = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
TAKES_NUMBERS: Final = (*INDEXING, "fill_", "masked_fill", "masked_fill_")
"""Not among torch's pointwise operators, although they accept a CPU tensor without dimensions as a number."""
NOT_DETERMINISTIC: Final = (
    *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward", "avg_pool3d_backward"),
    *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward"),
    *("upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward"),
    *("reflection_pad3d_backward", "nll_loss2d_forward", "_ctc_loss_backward", "put_", "histc", "median", "grid_sampler_2d_backward"),
    "grid_sampler_3d_backward",
)
"""The operators that raise an error on CUDA according to the documentation of torch.use_deterministic_algorithms."""


def require_sound(func: Any, name: str, args: Sequence[Any], on_cpu: Sequence[Tensor]) -> None:
    """Raise what CUDA raises for an operator that gets a tensor of the device, or gives one.

    Args:
        func: The operator's overload.
        name: Of the operator.
        args: As given.
        on_cpu: The tensors among its arguments that are on the CPU.

    Raises:
        DeviceError: it has no kernel there, or tensors lie on both devices.
        RuntimeError: it has no deterministic kernel, and such are asked for.
    """
    if not _has_kernel(func.name()):
        raise DeviceError(f"Could not run '{func.name()}' with arguments from the 'CUDA' backend: there is no such kernel")
    if name in NOT_DETERMINISTIC and torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        known = name.lstrip("_") + ("_out" if name.startswith("upsample") else "")
        raise RuntimeError(f"{known}_cuda does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'.")
    if on_cpu and len(on_cpu) < sum(isinstance(one, Tensor) for value in args for one in (value if isinstance(value, list | tuple) else [value])):
        _require_one_device(func, name, args, on_cpu)


@cache
def _has_kernel(name: str) -> bool:
    return not torch.backends.cuda.is_built() or torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")


def _require_one_device(func: Any, name: str, args: Sequence[Any], on_cpu: Sequence[Tensor]) -> None:
    """A CPU tensor without dimensions may take part where a number may, unless it is what is changed; CPU indices may be used on a tensor of the device."""
    first = args[0]
    to_index = {id(index) for index in args[1] if index is not None} if name in INDEXING and isinstance(first, PretendedTensor) else set()
    numbers = name in TAKES_NUMBERS or name.startswith("_foreach_") or torch.Tag.pointwise in func.tags
    wrong = [one for one in on_cpu if id(one) not in to_index and (one.dim() or not numbers or (func._schema.is_mutable and one is first))]
    if wrong:
        shapes = ", ".join(f"{one.dtype}{list(one.shape)}".removeprefix("torch.") for one in wrong)
        raise DeviceError(f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! {func} got from the CPU: {shapes}")
