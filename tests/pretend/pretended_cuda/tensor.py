"""The tensor that says it is on `cuda:0`.

To torch's C++ side it is on `lazy`, a device that has no tensors without a backend that nobody starts: so the backward pass needs neither a CUDA stream nor
a thread of its own, and what C++ makes beside it is known by that device. (`meta` would do but for indices from lists, which C++ makes there without values.)
To Python it is a CUDA tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from pretended_cuda.places import here

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
DISGUISE = torch.device("lazy", 0)
"""What C++ takes it for."""


class DeviceError(RuntimeError):
    """Something is on the wrong device. Says which line of the project's own code did it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}\n    at {here()}")


class DeviceStorage:
    """Memory of the device, which can be told from other memory and not be read."""

    def __init__(self, held: torch.UntypedStorage) -> None:
        self._held = held

    def data_ptr(self) -> int:
        return self._held.data_ptr() | 1 << 62

    def nbytes(self) -> int:
        return self._held.nbytes()


class PretendedTensor(Tensor):
    """Says `cuda:0`; its values are in `held`, a CPU tensor of the same shape, strides and type."""

    held: Tensor
    origin: tuple[Any, int, set[Any]] | None = None
    """The stream that made it, other than the first: that, its work up to here, and the streams for which its memory is kept."""
    handler: Callable[..., Any]
    """Runs an operator; set by the module that does, which needs this class."""

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendedTensor:
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, layout=held.layout, device=DISGUISE
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.handler(func, args, kwargs or {})

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def data(self) -> PretendedTensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, PretendedTensor) or value.shape != self.shape or value.stride() != self.stride():
            raise NotImplementedError("the pretended device takes `.data` only of a tensor of the same device, shape and strides")
        self.held = value.held

    def get_device(self) -> int:
        return 0

    def record_stream(self, s: Any) -> None:
        if self.origin is not None:
            self.origin[2].add(s)

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format) -> Any:
        return self.to(CUDA, memory_format=memory_format)

    def cpu(self, memory_format: Any = torch.preserve_format) -> Any:
        return self.to(CPU, memory_format=memory_format)

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        """As Tensor.to: itself where nothing changes, which C++ cannot see."""
        if len(args) > 2 and isinstance(args[-1], bool) and not isinstance(args[0], torch.dtype):
            *args, copy = args
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        leaves = device is not None and device.type == "cpu"
        dtype = dtype or self.dtype
        formatted = memory_format in (None, torch.preserve_format) or self.is_contiguous(memory_format=memory_format)
        if not leaves and not copy and dtype == self.dtype and formatted:
            return self
        return torch.ops.aten._to_copy.default(
            self, dtype=dtype, device=CPU if leaves else CUDA, non_blocking=non_blocking, memory_format=memory_format or torch.preserve_format
        )

    def tolist(self) -> Any:
        return self.detach().cpu().tolist() if self.dim() else self.item()

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise DeviceError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.numpy()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise DeviceError("memory of cuda:0 is handed to other code through DLPack, which the pretended device has none of")

    def data_ptr(self) -> NoReturn:
        raise DeviceError("the address of a tensor on cuda:0 is asked for: C code on the CPU cannot read there, and the pretended device has no other")

    def untyped_storage(self) -> DeviceStorage:  # pyright: ignore[reportIncompatibleMethodOverride]
        return DeviceStorage(self.held.untyped_storage())

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendedTensor:
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                made._is_param = True
            memo[id(self)] = made
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a tensor of the CPU: what `torch.load(map_location="cpu")` makes of a file with CUDA tensors."""
        values = self.detach().cpu()
        made = torch.nn.Parameter(values, self.requires_grad) if getattr(self, "_is_param", False) else values.requires_grad_(self.requires_grad)
        return made.__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{self.held!r} pretending to be on cuda:0"
