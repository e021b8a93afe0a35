"""CUDA graphs of the pretended device: operators that are recorded without a result, and run whenever the graph is replayed."""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Any

import torch

from pretended_cuda.counts import RECORDER
from pretended_cuda.tensor import DeviceError, PretendedTensor

Call = Callable[[], Any]


class CUDAGraph:
    """The operators of one capture, with their results' memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Any]] = []

    def replay(self) -> None:
        RECORDER.launch()
        for call, made in self.calls:
            for old, new in zip(_tensors(made), _tensors(call()), strict=True):
                if not _same_memory(old, new):
                    old.held.copy_(new.held)


_CAPTURING: list[CUDAGraph] = []


def is_capturing() -> bool:
    return bool(_CAPTURING)


@contextmanager
def graph(cuda_graph: CUDAGraph, **_: Any) -> Generator[None]:
    """What is started within it is recorded; what it makes has no values before the first replay."""
    waited = RECORDER.waited
    _CAPTURING.append(cuda_graph)
    try:
        yield
    finally:
        _CAPTURING.pop()
    if RECORDER.waited != waited:
        raise DeviceError("the host waits for the device while a graph is captured")


def recorded(call: Call, made: Any, given: Collection[PretendedTensor]) -> Any:
    """What an operator makes of the tensors that it is given, which a graph remembers if one is being captured."""
    if _CAPTURING:
        _CAPTURING[-1].calls.append((call, made))
        for one in _tensors(made):
            if one.is_floating_point() and not any(_same_memory(one, other) for other in given):
                one.held.fill_(torch.nan)
    return made


def _tensors(made: Any) -> list[PretendedTensor]:
    return [one for one in (made if type(made) in (list, tuple) else [made]) if isinstance(one, PretendedTensor)]


def _same_memory(one: PretendedTensor, other: PretendedTensor) -> bool:
    return one.held.untyped_storage().data_ptr() == other.held.untyped_storage().data_ptr()
