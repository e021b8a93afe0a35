"""Several tensors as one, so that they travel in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def pack(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """uint8[bytes]: all of them one after the other, row by row, each at a multiple of 16; and where each begins."""
    offsets, end = list[int](), 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // 16) * 16
    flat = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, offsets, strict=True):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat[start : start + len(raw)] = raw
    return flat, offsets


def unpack(flat: Tensor, tensors: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """What `pack` put together, each in memory of its own that is laid out as that of its place in `tensors`: a channels_last one stays so."""
    return [
        torch.empty_like(tensor).copy_(flat[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape))
        for tensor, start in zip(tensors, offsets, strict=True)
    ]


def from_rank(rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a rank has in the place of these tensors, which lie alike in all; there they are these themselves. All ranks must call it."""
    flat, offsets = pack(list(tensors))
    dist.broadcast(flat, rank)
    return list(tensors) if dist.get_rank() == rank else unpack(flat, list(tensors), offsets)
