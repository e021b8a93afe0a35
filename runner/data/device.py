"""Moves batches to the device; on CUDA the next one while the current one is computed."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from samewise.runner.interfaces import Batch

Item = TypeVar("Item")


def mover(device: torch.device, *, channels_last: bool) -> Callable[[Batch], Batch]:
    """Make a function that moves a batch's tensors, also those in containers, to the device.

    Args:
        device: The device.
        channels_last: Whether 4-d tensors get the memory format channels_last.
    """
    if device.type == "cpu" and not channels_last:
        return lambda batch: batch

    def move(tensor: Tensor) -> Tensor:
        memory_format = (
            torch.channels_last if channels_last and tensor.dim() == 4 else torch.preserve_format
        )
        return tensor.to(device, non_blocking=True, memory_format=memory_format)

    return partial(map_tensors, move)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to a batch's tensors, including those in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = (map_tensors(change, item) for item in value)
        kind: Any = type(value)
        # `_make` bypasses a named tuple's own __new__, which may change its arguments.
        return kind._make(items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, dict):
        # A copy keeps the type, as torch's default_collate does. `update` would add in a Counter.
        changed = copy(value)
        for name, item in value.items():
            changed[name] = map_tensors(change, item)
        return changed
    return value


def copied(value: Any) -> Any:
    """Clone the tensors of a value, so that who receives it may change them in place."""
    return map_tensors(Tensor.clone, value)


@final
class Prefetcher:
    """Copies batches to a CUDA device without waiting.

    Args:
        device: The device.
        move: Moves a batch there.
        pin: Whether to copy from page-locked memory; copies from other memory block.
    """

    def __init__(self, device: torch.device, move: Callable[[Batch], Batch], *, pin: bool) -> None:
        self._device, self._move, self._pin = device, move, pin
        self._stream = torch.cuda.Stream(device)

    def send(self, batch: Batch) -> Callable[[], Batch]:
        """Start the copy, and return a function that returns the batch on the device.

        Later work on the device waits for the copy; the host does not.
        """
        with torch.cuda.stream(self._stream):
            batch_on_device = self._move(
                map_tensors(Tensor.pin_memory, batch) if self._pin else batch
            )
            copy_done = torch.cuda.Event()
            copy_done.record(self._stream)

        def take() -> Batch:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copy_done)
            return map_tensors(lambda tensor: _keep_for_stream(tensor, stream), batch_on_device)

        return take


def _keep_for_stream(tensor: Tensor, stream: Any) -> Tensor:
    """Keep the tensor's memory from being reused while the stream may still read it."""
    tensor.record_stream(stream)
    return tensor


@final
class Ahead(Iterator[Item]):
    """Yields items, each made on request, or earlier by `make`."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._outcomes = list[tuple[Item] | BaseException]()

    def make(self) -> None:
        """Make the next item now. An exception is raised when its turn comes."""
        if not self._outcomes:
            self._outcomes.append(_next_or_error(self._items))

    def __next__(self) -> Item:
        self.make()
        outcome = self._outcomes.pop()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]


def prefetch_one(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, each made before the previous one is used."""
    ahead = Ahead(items)
    for item in ahead:
        ahead.make()
        yield item


def _next_or_error(iterator: Iterator[Item]) -> tuple[Item] | BaseException:
    try:
        return (next(iterator),)
    except Exception as error:
        return error
