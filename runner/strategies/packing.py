"""Packs several tensors into one, so that one collective sends them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def pack(tensors: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Pack tensors, row-major, into uint8[bytes], and return it with their offsets.

    Each is aligned to 16 bytes.
    """
    offsets, end = list[int](), 0
    for tensor in tensors:
        offsets.append(end)
        # Torch views bytes as another dtype only at a multiple of its size, which is at most 16
        end += -(-tensor.numel() * tensor.element_size() // 16) * 16
    flat = torch.zeros(end, dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, offsets, strict=True):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat[start : start + len(raw)] = raw
    return flat, offsets


def unpack(flat: Tensor, tensors: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """Split the tensor that `pack` returned.

    Each tensor gets new memory with the layout of its counterpart in `tensors`, such as
    channels_last.
    """
    return [
        torch.empty_like(tensor).copy_(
            flat[start : start + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
        )
        for tensor, start in zip(tensors, offsets, strict=True)
    ]


def from_rank(rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a rank's values of these tensors, which have the same layout everywhere.

    All ranks must call it.
    """
    flat, offsets = pack(list(tensors))
    dist.broadcast(flat, rank)
    return list(tensors) if dist.get_rank() == rank else unpack(flat, list(tensors), offsets)
