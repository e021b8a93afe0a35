"""Digests of tensors: xxh3 for the trace of every step, SHA-256 for what is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from struct import pack
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order, as bytes, on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def digests(tensors: Iterable[Tensor | None]) -> list[int]:
    """xxh3 (64 bits) of each tensor's elements in the order they lie in memory: quick, and the same for the same memory format; 0 for None."""
    return [0 if tensor is None else xxhash.xxh3_64_intdigest(_memory(tensor)) for tensor in tensors]


def combine(numbers: Sequence[int]) -> int:
    """One digest of digests, in order."""
    return xxhash.xxh3_64_intdigest(pack(f"<{len(numbers)}Q", *numbers))


def value_digest(value: object) -> int:
    """A digest of a batch: tensors, numbers, texts, and dicts, lists and tuples of them."""
    total = xxhash.xxh3_64()
    _feed(total, value)
    return total.intdigest()


def _feed(total: xxhash.xxh3_64, value: object) -> None:
    if isinstance(value, Tensor):
        total.update(_form(value.dtype, value.shape))
        total.update(_memory(value))
    elif isinstance(value, dict):
        for name, item in value.items():
            total.update(f"{name}:".encode())
            _feed(total, item)
    elif isinstance(value, list | tuple):
        total.update(f"{len(value)}:".encode())
        for item in value:
            _feed(total, item)
    elif isinstance(value, np.ndarray):
        total.update(f"{value.dtype}{list(value.shape)}".encode())
        total.update(np.ascontiguousarray(value).reshape(-1).data.cast("B"))
    else:
        total.update(repr(value).encode())


@lru_cache(1024)
def _form(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{list(shape)}".encode()


def _memory(tensor: Tensor) -> Any:
    """An array of the elements as they lie in memory, on the CPU; copied only where they are not dense. Called for every parameter of every step."""
    dense = tensor.detach()
    if not dense.is_cpu:
        dense = dense.to("cpu")
    if not dense.is_contiguous():
        # A channels_last tensor is contiguous once its channels are last: no copy is needed to hash it.
        dense = dense.permute(0, 2, 3, 1) if dense.dim() == 4 and dense.is_contiguous(memory_format=torch.channels_last) else dense.contiguous()
    if dense.dtype is torch.bfloat16:
        dense = dense.view(torch.int16)
    return dense.numpy()


def state_digest(state: Mapping[str, Tensor], *, shards: int = 1, sharded: Collection[str] = ()) -> int:
    """xxh3 of a whole state_dict, in its order: what a trace's `weights` is, for a checkpoint.

    Args:
        state: Names to tensors.
        shards: Into how many parts of the first dimension (as torch.chunk cuts) those of `sharded` were cut, each digested by itself.
        sharded: Names.
    """
    return combine(tensor_digests(state, shards=shards, sharded=sharded))


def tensor_digests(state: Mapping[str, Tensor], *, shards: int = 1, sharded: Collection[str] = ()) -> list[int]:
    """xxh3 of each tensor of a state_dict, as a trace has them; for the arguments see `state_digest`."""
    return [combine(_of_shards(one, shards)) if shards > 1 and name in sharded else digests([one])[0] for name, one in state.items()]


def _of_shards(tensor: Tensor, shards: int) -> list[int]:
    cut = list(tensor.chunk(shards))
    return digests([*cut, *[tensor[:0]] * (shards - len(cut))])


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of a state_dict: names sorted, then for each its name, dtype, shape and bytes (row-major)."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        total.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{','.join(map(str, tensor.shape))}\0".encode())
        if tensor.numel():
            total.update(tensor_bytes(tensor))
    return total.hexdigest()
