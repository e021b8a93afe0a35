"""Makes torch find the pretended device, for a while."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torchvision.io  # noqa: F401 (registers the decoders)
from torch import _VF, Tensor, nn
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from pretended_cuda import cuda_only
from pretended_cuda.counts import RECORDER, Counts
from pretended_cuda.graphs import CUDAGraph, graph, is_capturing
from pretended_cuda.operators import execute
from pretended_cuda.randomness import GENERATOR
from pretended_cuda.streams import Event, Stream, current_stream, stream
from pretended_cuda.tensor import CUDA, DISGUISE, PretendedTensor

FACTS = SimpleNamespace(name="Pretended H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132, L2_cache_size=50 * 2**20, uuid="pretended")


class PretendedDevice(TorchDispatchMode):
    """Sees every operator, so that tensors can be made on the device, or moved to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return execute(func, args, kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; to tell torch so would import its compiler, which takes seconds

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """What happens within is counted."""
        counts = Counts()
        RECORDER.open.append(counts)
        try:
            yield counts
        finally:
            RECORDER.open.remove(counts)


@contextmanager
def pretended() -> Generator[PretendedDevice]:
    """Within it torch finds one CUDA device, whether the machine has one or not."""
    torch._C._ensureCUDADeviceGuardSet()  # on a machine without CUDA device: C++ may then say that it moves to one
    with ExitStack() as held:
        for owner, name, value in _replacements():
            held.enter_context(mock.patch.object(owner, name, value))
        lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes a CPU tensor, and moves it
        held.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        yield held.enter_context(PretendedDevice())


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """What of torch is replaced: the object, the attribute, and its value."""
    for name, value in _answers().items():
        yield torch.cuda, name, value
    for name, value in (("is_available", True), ("current_device_index", 0), ("set_device_index", None), ("current_accelerator", CUDA)):
        yield torch.accelerator, name, lambda *_, value=value, **__: value
    yield Tensor, "pin_memory", lambda tensor, *_: tensor
    yield torch._C, "_group_tensors_by_device_and_dtype", _grouped(torch._C._group_tensors_by_device_and_dtype)
    yield _foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, PretendedTensor]
    yield nn.Module, "_apply", _swapping(nn.Module._apply)
    yield nn.RNNBase, "flatten_parameters", _unless_ours(nn.RNNBase.flatten_parameters)
    yield torch.ops.image, "decode_jpegs_cuda", cuda_only.chosen_decode_jpegs(torch.ops.image.decode_jpegs_cuda, execute)
    for name in ("gru", "lstm", "gru_cell", "dropout"):
        for owner in (_VF, torch):
            yield owner, name, getattr(cuda_only, f"chosen_{name}")(getattr(owner, name))


def _answers() -> dict[str, Any]:
    """What torch.cuda says, does and has."""
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": is_capturing,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_name": lambda *_: FACTS.name,
        "get_device_capability": lambda *_: (FACTS.major, FACTS.minor),
        "get_device_properties": lambda *_: FACTS,
        "synchronize": lambda *_: RECORDER.wait(),
        "empty_cache": lambda: None,
        "memory_allocated": lambda *_: 0,
        "memory_stats": lambda *_: {},
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "manual_seed": GENERATOR.seed,
        "manual_seed_all": GENERATOR.seed,
        "get_rng_state": lambda *_: GENERATOR.get_state(),
        "get_rng_state_all": lambda: [GENERATOR.get_state()],
        "set_rng_state": lambda state, *_: GENERATOR.set_state(state),
        "set_rng_state_all": lambda states: GENERATOR.set_state(states[0]),
        "default_generators": (GENERATOR,),
        "Event": Event,
        "Stream": Stream,
        "current_stream": current_stream,
        "stream": stream,
    }


def _grouped(real: Callable[..., Any]) -> Callable[..., Any]:
    """Group tensors as C++ does, and name the device as Python knows it."""

    def grouped(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return {(CUDA if device is not None and device.type == DISGUISE.type else device, dtype): group for (device, dtype), group in found.items()}

    return grouped


def _swapping(real: Callable[..., Any]) -> Callable[..., Any]:
    """`Module._apply` that keeps parameters the objects that they are, as it does on a real device, where their data alone is replaced."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return real(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply


def _unless_ours(real: Callable[..., Any]) -> Callable[..., Any]:
    """`RNNBase.flatten_parameters`, which lays a real device's weights side by side."""

    def flatten(layer: Any) -> None:
        if not any(isinstance(weight, PretendedTensor) for weight in layer._flat_weights):
            real(layer)

    return flatten
