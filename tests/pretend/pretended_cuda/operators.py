"""How an operator runs where a tensor pretends: checked as CUDA would, counted, and computed on the CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from pretended_cuda import cuda_only
from pretended_cuda.checks import INDEXING, require_sound
from pretended_cuda.counts import RECORDER
from pretended_cuda.graphs import is_capturing, recorded
from pretended_cuda.randomness import GENERATOR
from pretended_cuda.streams import begun, current_stream
from pretended_cuda.tensor import CPU, DISGUISE, DeviceError, PretendedTensor

COPYING: Final = ("_to_copy", "copy_", "_foreach_copy_")
STARTS_NOTHING: Final = ("_unsafe_view", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_")
WAITS_INSIDE: Final[Mapping[str, int]] = {"multinomial": 2, "nms": 1, "bincount": 2, "decode_jpegs_cuda": 2}
"""Operators whose CUDA kernel reads values of its own: probabilities are checked, boxes gathered, the number of bins found; nvJPEG's own stream."""


def execute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one of torch's operators.

    Raises:
        DeviceError, RuntimeError: CUDA would refuse it.
    """
    name = func.overloadpacket.__name__
    device = kwargs.get("device", args[2] if name == "decode_jpegs_cuda" else None)
    goes = device is not None and torch.device(device).type in ("cuda", DISGUISE.type)  # C++ makes something like a tensor of ours
    ours, on_cpu = list[PretendedTensor](), list[Tensor]()
    held_args = [_held(value, ours, on_cpu) for value in args]
    held_kwargs = {name: _held(value, ours, on_cpu) for name, value in kwargs.items()}
    if not ours and not goes:
        return func(*args, **kwargs)
    current_stream().use(ours)
    if name == "scalar_tensor" and torch.device(device).type == DISGUISE.type:
        return func(*args, **{**kwargs, "device": CPU})  # the number of `x[mask] = 0.0`, which torch leaves on the CPU for CUDA tensors
    if name in COPYING:
        starts_work = _copies(name, args, kwargs, goes=goes)
    else:
        require_sound(func, name, args, on_cpu if ours else ())
        _count_waits(func, name, args, kwargs)
        starts_work = not func.is_view and name not in STARTS_NOTHING
    given = {id(one.held): one for one in ours}  # what was changed in place is the tensor that was given

    def compute() -> Any:
        return _wrapped(_computed(func, name, held_args, held_kwargs), given)

    if device is not None and not goes:
        return _computed(func, name, held_args, held_kwargs)
    if starts_work and not is_capturing():
        RECORDER.launch()
    return begun(recorded(compute, compute(), ours))


PretendedTensor.handler = staticmethod(execute)


def _held(value: Any, ours: list[PretendedTensor], on_cpu: list[Tensor]) -> Any:
    """The argument as the CPU gets it; its tensors are added to one of the lists."""
    if isinstance(value, PretendedTensor):
        ours.append(value)
        return value.held
    if isinstance(value, Tensor):
        on_cpu.append(value)
    elif isinstance(value, list | tuple) and any(isinstance(one, Tensor | list | tuple) for one in value):
        return [_held(one, ours, on_cpu) for one in value]
    return value


def _computed(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    for setting, value in (("device", CPU), ("non_blocking", False), ("pin_memory", None)):
        if kwargs.get(setting) is not None:
            kwargs[setting] = value
    run: Callable[..., Any] = cuda_only.OPERATORS.get(name, func)
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return run(*args, **kwargs)
    if kwargs.get("generator") is not None:
        raise DeviceError("Expected a 'cuda' device type for generator but found 'cpu'")
    with GENERATOR.drawing():
        return run(*args, **kwargs)


def _wrapped(made: Any, given: Mapping[int, PretendedTensor]) -> Any:
    """Results as tensors of the device."""
    if isinstance(made, Tensor):
        return given[id(made)] if id(made) in given else PretendedTensor(made)
    return type(made)(_wrapped(one, given) for one in made) if type(made) in (list, tuple) else made


def _size(tensor: Tensor) -> int:
    """In bytes."""
    return tensor.numel() * tensor.element_size()


def _copies(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, goes: bool) -> bool:
    """Count what crosses between host and device; whether anything is copied, or changes its type or layout, on the device itself."""
    if name == "_to_copy":
        leaves = kwargs.get("device") is not None and not goes
        return _copy(args[0], to_device=not leaves, blocking=not kwargs.get("non_blocking"))
    targets, sources = (args[0], args[1]) if name == "_foreach_copy_" else ([args[0]], [args[1]])
    blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    pairs = zip(targets, sources, strict=True)
    return sum(_copy(source, to_device=isinstance(target, PretendedTensor), blocking=blocking) for target, source in pairs) > 0


def _copy(source: Tensor, *, to_device: bool, blocking: bool) -> bool:
    if isinstance(source, PretendedTensor) and not to_device:
        RECORDER.copy_out(_size(source), blocking=blocking)
        return False
    if to_device and not isinstance(source, PretendedTensor):
        RECORDER.copy_in(_size(source), blocking=blocking)
        return False
    return True


def _count_waits(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if name in INDEXING:
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        if len(indices) == len(masks) == 1 and len(args) > 2 and not isinstance(args[2], PretendedTensor):
            return  # a number to set by one mask: torch fills
        for index in indices:
            if not isinstance(index, PretendedTensor):
                RECORDER.copy_in(_size(index), blocking=True)  # torch takes it to the device by itself
            elif any(index is mask for mask in masks):
                RECORDER.wait()
    elif torch.Tag.data_dependent_output in func.tags:
        RECORDER.copy_out(args[0].element_size() if name == "_local_scalar_dense" else 1, blocking=True)
    elif torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
        RECORDER.wait()
    elif name == "decode_jpegs_cuda":
        for encoded in args[0]:
            RECORDER.copy_in(_size(encoded), blocking=False)
    RECORDER.wait(WAITS_INSIDE.get(name, 0))
