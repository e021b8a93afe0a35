"""Digests of tensors computed on their device, and values copied from a device: both are started first and read later, to avoid waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAME = "multilinear64"
"""The digest's name in a trace's head."""
_ROW = 1 << 20
_GROUP = 16 * _ROW
_STRIDE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class PendingTensor:
    """A device's tensor that is being copied to the host without waiting; its current values, even if it changes later."""

    def __init__(self, values: Tensor) -> None:
        self._host = values.detach().to("cpu", non_blocking=True, copy=True)  # into page-locked memory
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[Any]:
        """The values, after waiting for the copy if needed."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


def numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Convert numbers and one-element tensors to numbers; those on a device are read together."""
    far = [one for one in values if isinstance(one, Tensor) and not one.is_cpu]
    read = iter(PendingTensor(torch.stack([one.detach().double() for one in far])).read() if far else ())
    return [one if not isinstance(one, Tensor) else one.item() if one.is_cpu else next(read) for one in values]


def begin(tensors: Sequence[Tensor | None]) -> Callable[[], list[int]]:
    """Start to digest tensors; return a function that reads the 64-bit digests, 0 for None and for empty tensors.

    A digest is of the elements' bytes in the order they lie in memory, as little-endian signed 32-bit words, the last filled up with zeros. In each row of
    2**20 words, word i is multiplied by f[i] = splitmix64's output i | 1, and the products are added up to s[r]; the digest is the sum over all rows of the
    splitmix64 mix of s[r] + r * 0x9E3779B97F4A7C15. All is modulo 2**64, so any device computes the same, in any order. One word that differs always changes
    its row's sum. It is not a signature: data with a given digest are easily made.
    """
    rows = [list(_words(one).split(_ROW)) if one is not None and one.numel() else [] for one in tensors]
    sums = [PendingTensor(_sums(group)) for group in _groups([row for one in rows for row in one])]

    def read() -> list[int]:
        found = (one - before for each in sums for before, one in pairwise([0, *each.read()]))
        return [_mix(list(islice(found, len(one)))) for one in rows]

    return read


def _groups(rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors, sized so that intermediate results take little memory."""
    group, words = list[Tensor](), 0
    for row in rows:
        if group and (words + len(row) > _GROUP or group[0].device != row.device):
            yield group
            group, words = [], 0
        group, words = [*group, row], words + len(row)
    if group:
        yield group


def _sums(rows: Sequence[Tensor]) -> Tensor:
    """int64[R]: cumulative sums over all rows, in a few kernel launches. Integer sums do not depend on the order."""
    factors = _factors(rows[0].device, _ROW)
    products = torch.cat(list(rows)).to(torch.int64)
    each = products.split([len(row) for row in rows])
    torch._foreach_mul_(each, [factors[: len(row)] for row in rows])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return torch.cat([up_to[-1:] for up_to in products.cumsum(0).split([len(row) for row in rows])])


def dense(tensor: Tensor) -> Tensor:
    """The elements in memory order, as one dimension; copied only if they are not dense."""
    held = tensor.detach()
    if not held.is_contiguous():
        # A channels_last tensor is contiguous with its channels moved last: hashing needs no copy.
        held = held.permute(0, 2, 3, 1) if held.dim() == 4 and held.is_contiguous(memory_format=torch.channels_last) else held.contiguous()
    return held.reshape(-1)


def _words(tensor: Tensor) -> Tensor:
    flat = dense(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.element_size() < 4:
        flat = flat.view(torch.uint8)
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 4)])
    return flat.view(torch.int32)


@lru_cache(8)
def _factors(device: torch.device, length: int) -> Tensor:
    """int64[length], on the device."""
    numbers = np.arange(length, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        mixed = numbers * np.uint64(_STRIDE)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


def _mix(sums: Sequence[int]) -> int:
    return sum(_splitmix64((one + number * _STRIDE) & _MASK) for number, one in enumerate(sums)) & _MASK


def _splitmix64(number: int) -> int:
    mixed = (number + _STRIDE) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)
