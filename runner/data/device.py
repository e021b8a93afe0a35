"""A batch on its way to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from samewise.runner.interfaces import Batch


def mover(device: torch.device, *, channels_last: bool) -> Callable[[Batch], Batch]:
    """A function that takes a batch to the device: tensors, and lists of them; 4-d ones in channels_last where that is wanted."""
    if device.type == "cpu" and not channels_last:
        return lambda batch: batch

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            memory_format = torch.channels_last if channels_last and value.dim() == 4 else torch.preserve_format
            return value.to(device, non_blocking=True, memory_format=memory_format)
        if isinstance(value, list | tuple):
            return type(value)(move(item) for item in value)
        if isinstance(value, dict):
            return {name: move(item) for name, item in value.items()}
        return value

    return move
