"""Digests of tensors computed on their device, and values copied from a device: both are started
first and read later, to avoid waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samewise.runner.errors import first_line
from samewise.runner.torch_private import foreach_mul_

NAME = "multilinear64"
"""The digest's name in a trace's head."""
_ROW = 1 << 20
_GROUP = 16 * _ROW
_STRIDE = 0x9E3779B97F4A7C15
_PLAIN = (Tensor, nn.Parameter)


class PendingTensor:
    """A device's tensor that is being copied to the host without waiting.

    Its current values, even if it changes later.
    """

    def __init__(self, values: Tensor) -> None:
        # Into page-locked memory
        self._host = values.detach().to("cpu", non_blocking=True, copy=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> np.ndarray[Any, Any]:
        """The values, after waiting for the copy if needed."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()


def begin_numbers(values: Sequence[float | Tensor]) -> Callable[[], list[float]]:
    """Start to copy one-element tensors from a device, together.

    Return what waits for them and gives all values as numbers.
    """
    far = [one for one in values if isinstance(one, Tensor) and not one.is_cpu]
    if not far:
        near = [one.item() if isinstance(one, Tensor) else one for one in values]
        return lambda: near
    copied = PendingTensor(torch.stack([one.detach().double() for one in far]))

    def read() -> list[float]:
        found = iter(copied.read().tolist())
        return [
            one if not isinstance(one, Tensor) else one.item() if one.is_cpu else next(found)
            for one in values
        ]

    return read


def begin(tensors: Sequence[Tensor | None]) -> Callable[[], list[int]]:
    """Start to digest tensors.

    Return a function that reads the 64-bit digests, 0 for None and for empty tensors.

    A digest is of the elements' bytes in the order they lie in memory, as little-endian signed
    32-bit words, the last filled up with zeros. In each row of 2**20 words, word i is multiplied by
    f[i] = splitmix64's output i | 1, and the products are added up to s[r]; the digest is the sum
    over all rows of the splitmix64 mix of s[r] + r * 0x9E3779B97F4A7C15. All is modulo 2**64, so
    any device computes the same, in any order. One word that differs always changes its row's sum.
    It is not a signature: data with a given digest are easily made.
    """
    device = next((one.device for one in tensors if one is not None), None)
    if (
        device
        and device.type == "cuda"
        and all(one is None or (type(one) in _PLAIN and one.device == device) for one in tensors)
        and _has_kernel(device)
    ):
        return _begin_by_kernel(tensors, device)
    return _begin_by_operators(tensors)


def _begin_by_kernel(
    tensors: Sequence[Tensor | None], device: torch.device
) -> Callable[[], list[int]]:
    from samewise.runner.records import on_device_kernel

    whole = [
        None if one is None or not one.numel() else one if _is_whole(one) else _words(one)
        for one in tensors
    ]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        started = on_device_kernel.row_sums(whole, _factors(device, _ROW))
        if started is None:
            return lambda: [0] * len(tensors)
        sums, chunks = PendingTensor(started[0]), started[1]
    return lambda: _mix(np.add.reduceat(sums.read(), chunks.rows), chunks.rows_of)


def _begin_by_operators(tensors: Sequence[Tensor | None]) -> Callable[[], list[int]]:
    rows = [
        list(_words(one).split(_ROW)) if one is not None and one.numel() else [] for one in tensors
    ]
    sums = [PendingTensor(_sums(group)) for group in _groups([row for one in rows for row in one])]

    def read() -> list[int]:
        found = [np.diff(each.read(), prepend=0) for each in sums]
        return _mix(
            np.concatenate(found) if found else np.zeros(0, np.int64), [len(one) for one in rows]
        )

    return read


@lru_cache(8)
def _has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on this device and gives what torch's operators give.

    If not, a warning says so once.
    """
    if find_spec("triton") is None:
        return False
    tried = [
        torch.arange(-3, length, device=device).to(dtype)
        for dtype, length in ((torch.float32, _ROW + 9), (torch.float64, 70), (torch.bfloat16, 4))
    ]
    try:
        same = _begin_by_kernel(tried, device)() == _begin_by_operators(tried)()
        trouble = "" if same else "it gives other digests than torch's operators"
    except (
        Exception
    ) as error:  # of Triton's: no C compiler, a new device, a folder that cannot be written to
        trouble = f"{type(error).__name__}: {first_line(error)}"
    if trouble:
        print(
            "warning: the trace's digests take longer, as Triton's kernel cannot be used: "
            f"{trouble}",
            file=sys.stderr,
        )
    return not trouble


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
    """int64[R]: cumulative sums over all rows, in a few kernel launches.

    Integer sums do not depend on the order.
    """
    factors = _factors(rows[0].device, _ROW)
    products = torch.cat(list(rows)).to(torch.int64)
    each = products.split([len(row) for row in rows])
    foreach_mul_(each, [factors[: len(row)] for row in rows])
    return torch.cat([up_to[-1:] for up_to in products.cumsum(0).split([len(row) for row in rows])])


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor's memory is dense and made of whole words, and has its elements, not those
    that they are the conjugates or negatives of.
    """
    if tensor.is_conj() or tensor.is_neg():
        return False
    is_dense = tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return is_dense and not (tensor.nbytes | tensor.data_ptr()) & 3


def dense(tensor: Tensor) -> Tensor:
    """The elements in memory order, as one dimension; copied only if they are not dense."""
    held = tensor.detach().resolve_conj().resolve_neg()
    if not held.is_contiguous():
        # A channels_last tensor is contiguous with its channels moved last: hashing needs no copy.
        held = (
            held.permute(0, 2, 3, 1)
            if held.dim() == 4 and held.is_contiguous(memory_format=torch.channels_last)
            else held.contiguous()
        )
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
    with np.errstate(over="ignore"):
        mixed = _splitmix64(np.arange(length, dtype=np.uint64) * np.uint64(_STRIDE)) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


def _mix(sums: np.ndarray[Any, Any], rows_of: Sequence[int]) -> list[int]:
    """The digests of tensors of so many rows each, from the int64 sums of all their rows."""
    rows = np.asarray(rows_of, np.int64)
    ends = rows.cumsum()
    number = (np.arange(len(sums)) - np.repeat(ends - rows, rows)).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = _splitmix64(sums.view(np.uint64) + number * np.uint64(_STRIDE))
        up_to = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        return (up_to[ends] - up_to[ends - rows]).tolist()


def _splitmix64(state: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The generator's output after the states uint64[N], modulo 2**64."""
    mixed = state + np.uint64(_STRIDE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
