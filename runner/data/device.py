"""A batch on its way to the device; on CUDA the next one, while this one is computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from samewise.runner.interfaces import Batch

Item = TypeVar("Item")


def mover(device: torch.device, *, channels_last: bool) -> Callable[[Batch], Batch]:
    """A function that takes a batch to the device: tensors, and lists of them; 4-d ones in channels_last where that is wanted."""
    if device.type == "cpu" and not channels_last:
        return lambda batch: batch

    def move(tensor: Tensor) -> Tensor:
        memory_format = torch.channels_last if channels_last and tensor.dim() == 4 else torch.preserve_format
        return tensor.to(device, non_blocking=True, memory_format=memory_format)

    return partial(map_tensors, move)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A batch with its tensors changed: in lists, tuples and dicts, of which it may hold some."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return {name: map_tensors(change, item) for name, item in value.items()}
    return value


@final
class Ahead:
    """Sends batches to a CUDA device by `move`, which does not wait; with `pin` from page-locked memory, since from other memory a copy waits."""

    def __init__(self, device: torch.device, move: Callable[[Batch], Batch], *, pin: bool) -> None:
        self._device, self._move, self._pin = device, move, pin
        self._stream = torch.cuda.Stream(device)

    def send(self, batch: Batch) -> Callable[[], Batch]:
        """Begin to copy, and give what gives the batch on the device: whoever computes with it is started once it is there. The host waits for nothing."""
        with torch.cuda.stream(self._stream):
            moved = self._move(map_tensors(Tensor.pin_memory, batch) if self._pin else batch)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)

        def take() -> Batch:
            at_work = torch.cuda.current_stream(self._device)
            at_work.wait_event(arrived)
            return map_tensors(lambda tensor: _used_on(tensor, at_work), moved)

        return take


def _used_on(tensor: Tensor, stream: Any) -> Tensor:
    """Keep its memory from being given away while the stream may still read it."""
    tensor.record_stream(stream)
    return tensor


def one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """The items, each made before the one before it is handed out. What making it raises is raised when its turn comes."""
    iterator = iter(items)
    held = _made(iterator)
    while not isinstance(held, BaseException):
        following = _made(iterator)
        yield held[0]
        held = following
    if not isinstance(held, StopIteration):
        raise held


def _made(iterator: Iterator[Item]) -> tuple[Item] | BaseException:
    try:
        return (next(iterator),)
    except Exception as error:
        return error
