"""Digests tensors on their device, and copies values from a device.

Both are started first and read later, so that the host does not wait for the device.
"""

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
"""Name of the digest in a trace's head."""
_ROW = 1 << 20
# The int64 products of a group take 128 MiB
_GROUP = 16 * _ROW
# The increment of splitmix64: 2**64 divided by the golden ratio
_STRIDE = 0x9E3779B97F4A7C15
_PLAIN = (Tensor, nn.Parameter)


class PendingTensor:
    """A device's tensor that is being copied to the host without waiting.

    It has the values at the time of the call, even if the tensor changes later.
    """

    def __init__(self, values: Tensor) -> None:
        # torch copies into page-locked memory here, without which the copy would wait
        self._host = values.detach().to("cpu", non_blocking=True, copy=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> np.ndarray[Any, Any]:
        """Return the values, after waiting for the copy if needed."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()


def begin_numbers(values: Sequence[float | Tensor]) -> Callable[[], list[float]]:
    """Start to copy one-element tensors from a device, together.

    Returns:
        A function that waits for them and returns all values as numbers.
    """
    on_device = [x for x in values if isinstance(x, Tensor) and not x.is_cpu]
    if not on_device:
        numbers = [x.item() if isinstance(x, Tensor) else x for x in values]
        return lambda: numbers
    pending = PendingTensor(torch.stack([x.detach().double() for x in on_device]))

    def read() -> list[float]:
        copies = iter(pending.read().tolist())
        return [
            x if not isinstance(x, Tensor) else x.item() if x.is_cpu else next(copies)
            for x in values
        ]

    return read


def begin(tensors: Sequence[Tensor | None]) -> Callable[[], list[int]]:
    """Start to digest tensors, and return a function that reads their digests.

    A digest has 64 bits, and is 0 for None and for empty tensors. It covers the elements' bytes in
    memory order, as little-endian signed 32-bit words, the last one padded with zeros. In each row
    of 2**20 words, word i is multiplied by f[i] = splitmix64's output i | 1, and the products are
    added up to s[r]. The digest is the sum over all rows of the splitmix64 mix of s[r] + r *
    0x9E3779B97F4A7C15. All is modulo 2**64, so any device computes the same, in any order.

    One word that differs always changes its row's sum. It is not a signature: data with a chosen
    digest are easily made.
    """
    device = next((x.device for x in tensors if x is not None), None)
    if (
        device
        and device.type == "cuda"
        and all(x is None or (type(x) in _PLAIN and x.device == device) for x in tensors)
        and _has_kernel(device)
    ):
        return _begin_by_kernel(tensors, device)
    return _begin_by_operators(tensors)


def _begin_by_kernel(
    tensors: Sequence[Tensor | None], device: torch.device
) -> Callable[[], list[int]]:
    from samewise.runner.records import on_device_kernel

    in_words = [
        None if x is None or not x.numel() else x if _is_whole(x) else _words(x) for x in tensors
    ]
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        row_sums = on_device_kernel.row_sums(in_words, _factors(device, _ROW))
        if row_sums is None:
            return lambda: [0] * len(tensors)
        sums, chunks = PendingTensor(row_sums[0]), row_sums[1]
    return lambda: _mix(np.add.reduceat(sums.read(), chunks.rows), chunks.rows_of)


def _begin_by_operators(tensors: Sequence[Tensor | None]) -> Callable[[], list[int]]:
    rows = [list(_words(x).split(_ROW)) if x is not None and x.numel() else [] for x in tensors]
    cumulative_sums = [
        PendingTensor(_sums(group)) for group in _groups([row for x in rows for row in x])
    ]

    def read() -> list[int]:
        sums = [np.diff(x.read(), prepend=0) for x in cumulative_sums]
        return _mix(np.concatenate(sums) if sums else np.zeros(0, np.int64), [len(x) for x in rows])

    return read


@lru_cache(8)
def _has_kernel(device: torch.device) -> bool:
    """Whether Triton's kernel runs on this device and gives the digests of torch's operators.

    Warns once if it does not.
    """
    if find_spec("triton") is None:
        return False
    samples = [
        torch.arange(-3, length, device=device).to(dtype)
        for dtype, length in ((torch.float32, _ROW + 9), (torch.float64, 70), (torch.bfloat16, 4))
    ]
    try:
        same = _begin_by_kernel(samples, device)() == _begin_by_operators(samples)()
        trouble = "" if same else "it gives other digests than torch's operators"
    except Exception as error:
        # Triton fails without a C compiler, on a new device, and if its cache cannot be written
        trouble = f"{type(error).__name__}: {first_line(error)}"
    if trouble:
        print(
            "warning: the trace's digests take longer, since Triton's kernel cannot be used: "
            f"{trouble}",
            file=sys.stderr,
        )
    return not trouble


def _groups(rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield rows in groups, sized so that intermediate results take little memory."""
    group, length = list[Tensor](), 0
    for row in rows:
        if group and (length + len(row) > _GROUP or group[0].device != row.device):
            yield group
            group, length = [], 0
        group, length = [*group, row], length + len(row)
    if group:
        yield group


def _sums(rows: Sequence[Tensor]) -> Tensor:
    """Return the cumulative sums over all rows, int64[R], in a few kernel launches."""
    factors, lengths = _factors(rows[0].device, _ROW), [len(row) for row in rows]
    products = torch.cat(list(rows)).to(torch.int64)
    foreach_mul_(products.split(lengths), [factors[:length] for length in lengths])
    # Integer sums do not depend on the order
    return torch.cat([row_sums[-1:] for row_sums in products.cumsum(0).split(lengths)])


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor's memory is dense, made of whole words, and holds its elements.

    A lazy conjugate or negative does not hold its elements.
    """
    if tensor.is_conj() or tensor.is_neg():
        return False
    is_dense = tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    # The kernel reads whole words at aligned addresses
    return is_dense and not (tensor.nbytes | tensor.data_ptr()) & 3


def dense(tensor: Tensor) -> Tensor:
    """Return the elements in memory order, in one dimension.

    They are copied only if they are not dense.
    """
    elements = tensor.detach().resolve_conj().resolve_neg()
    if not elements.is_contiguous():
        # A channels_last tensor is contiguous with its channels moved last: hashing needs no copy
        elements = (
            elements.permute(0, 2, 3, 1)
            if elements.dim() == 4 and elements.is_contiguous(memory_format=torch.channels_last)
            else elements.contiguous()
        )
    return elements.reshape(-1)


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
    """Return the factors of a row's words, int64[length], on the device."""
    # Overflow is meant: the digest is modulo 2**64
    with np.errstate(over="ignore"):
        # Odd factors, so that one word that differs always changes the sum
        mixed = _splitmix64(np.arange(length, dtype=np.uint64) * np.uint64(_STRIDE)) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


def _mix(sums: np.ndarray[Any, Any], rows_of: Sequence[int]) -> list[int]:
    """Return the digests of tensors of these many rows, from the int64 sums of all their rows."""
    rows = np.asarray(rows_of, np.int64)
    ends = rows.cumsum()
    number = (np.arange(len(sums)) - np.repeat(ends - rows, rows)).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = _splitmix64(sums.view(np.uint64) + number * np.uint64(_STRIDE))
        totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
        return (totals[ends] - totals[ends - rows]).tolist()


def _splitmix64(state: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the generator's outputs after the states uint64[N], modulo 2**64."""
    mixed = state + np.uint64(_STRIDE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
