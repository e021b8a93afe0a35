"""A batch on its way to the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samewise.runner.interfaces import Batch


def mover(device: torch.device, *, channels_last: bool) -> Callable[[Batch], Batch]:
    """A function that takes a batch to the device: tensors, and lists of them; 4-d ones in channels_last where that is wanted."""
    if device.type == "cpu" and not channels_last:
        return lambda batch: batch

    def move(tensor: Tensor) -> Tensor:
        memory_format = torch.channels_last if channels_last and tensor.dim() == 4 else torch.preserve_format
        return tensor.to(device, non_blocking=True, memory_format=memory_format)

    return partial(mapped, move)


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A batch with its tensors changed: in lists, tuples and dicts, of which it may hold some."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, item) for item in value)
    if isinstance(value, dict):
        return {name: mapped(change, item) for name, item in value.items()}
    return value
