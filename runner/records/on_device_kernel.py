"""Computes the digests of `on_device` by one launch of a Triton kernel, for any number of tensors.

torch's operators take several launches for each tensor: with them the trace of a ResNet-50 took
13 ms of a step of 45 ms on an H200.
"""

# Triton looks up what the annotations of a kernel's parameters name, so they have none.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, BLOCK = 1 << 14, 1 << 11
"""Words that a program adds up at most, and at a time."""


# Specialised, the kernel would be compiled anew for some numbers of chunks
@triton.jit(do_not_specialize=["programs"])
def add_up(chunks, programs, factors, sums, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Add up words times factors, modulo 2**64.

    sums[p] is the sum over chunk p's words w[i] of w[i] * factors[start + i].

    Args:
        chunks: int64[3, programs]: the address of a chunk's first word, its number of words, and
            the position of the first one in its row.
        programs: Number of chunks.
        factors: int64[R], one for each position in a row.
        sums: int64[programs], the result.
        CHUNK: Maximum number of words of a chunk.
        BLOCK: Number of words that are added up at a time.
    """
    program = tl.program_id(0)
    address = tl.load(chunks + program).to(tl.pointer_type(tl.int32))
    count = tl.load(chunks + programs + program)
    row_factors = factors + tl.load(chunks + 2 * programs + program)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for begin in range(0, CHUNK, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        word = tl.load(address + place, mask=place < count, other=0)
        factor = tl.load(row_factors + place, mask=place < count, other=0)
        total += word.to(tl.int64) * factor
    tl.store(sums + program, tl.sum(total))


class Chunks(NamedTuple):
    """Chunks for the kernel, and how their sums make up those of rows.

    Args:
        table: int64[3, P] on the device, as `add_up` takes it.
        rows: int64[R]: for each row of each tensor, the index of its first chunk.
        rows_of: Number of rows of each tensor.
    """

    table: Tensor
    rows: np.ndarray[Any, Any]
    rows_of: list[int]


def row_sums(tensors: Sequence[Tensor | None], factors: Tensor) -> tuple[Tensor, Chunks] | None:
    """Start to add up the words of tensors on one device; None if there are no words.

    Args:
        tensors: Dense tensors whose memory begins and ends at whole words of four bytes.
        factors: int64[R], one for each word of a row.
    """
    addresses = [(0, 0) if x is None else (x.data_ptr(), x.nbytes // 4) for x in tensors]
    chunks = _chunks(tuple(addresses), factors.device, len(factors))
    programs = chunks.table.shape[1]
    if not programs:
        return None
    sums = torch.empty(programs, dtype=torch.int64, device=factors.device)
    kernel: Any = add_up
    kernel[(programs,)](
        chunks.table, programs, factors, sums, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8
    )
    return sums, chunks


# Cached, since weights, and often gradients, are in the same place at every step
@lru_cache(16)
def _chunks(addresses: Sequence[tuple[int, int]], device: torch.device, row: int) -> Chunks:
    """Return the chunks of tensors at these (address, words)."""
    address, length = np.array(addresses, np.int64).reshape(-1, 2).T
    chunks = -(-length // CHUNK)
    owner = np.repeat(np.arange(len(chunks)), chunks)
    number = np.arange(len(owner)) - np.repeat(chunks.cumsum() - chunks, chunks)
    start = number * CHUNK
    table = np.stack(
        [address[owner] + 4 * start, np.minimum(CHUNK, length[owner] - start), start % row]
    )
    on_device = torch.from_numpy(table)
    if device.type == "cuda":
        on_device = on_device.pin_memory().to(device, non_blocking=True)
    return Chunks(on_device, np.flatnonzero(table[2] == 0), (-(-length // row)).tolist())
