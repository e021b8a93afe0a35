"""Digests of tensors: xxh3 for the trace of each step (on a device that of `on_device`), SHA-256 for what is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from struct import pack
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from samewise.runner.records import on_device

ALGORITHMS = (XXH3, ON_DEVICE) = ("xxh3", on_device.NAME)
"""What tensors in a trace are digested by: xxh3 on the CPU."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order, as bytes on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def digests(tensors: Iterable[Tensor | None]) -> list[int]:
    """The xxh3 (64 bits) of each tensor's elements in memory order: fast, and equal for equal memory formats; 0 for None."""
    return [0 if tensor is None else xxhash.xxh3_64_intdigest(_memory(tensor)) for tensor in tensors]


def begin(tensors: Sequence[Tensor | None], algorithm: str) -> Callable[[], list[int]]:
    """Start to digest tensors in their current state; return a function that reads the digests (0 for None). With xxh3, device tensors are copied at once."""
    if algorithm == ON_DEVICE:
        return on_device.begin(tensors)
    found = digests(tensors)
    return lambda: found


def combine(numbers: Sequence[int]) -> int:
    """One digest of several digests, in order."""
    return xxhash.xxh3_64_intdigest(pack(f"<{len(numbers)}Q", *numbers))


def value_digest(value: object, known: Iterator[int] | None = None) -> int:
    """A digest of a batch of tensors, numbers and texts in dicts, lists and tuples. `known`: the digests of its tensors if taken already."""
    total = xxhash.xxh3_64()
    _update_hash(total, value, known)
    return total.intdigest()


def begin_value(value: object) -> Callable[[], int]:
    """Start to digest a batch, its tensors on their device; return a function that reads the digest."""
    read = on_device.begin(list(tensors_in(value)))
    return lambda: value_digest(value, iter(read()))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item)


def _update_hash(total: xxhash.xxh3_64, value: object, known: Iterator[int] | None) -> None:
    """`known` contains the tensors' digests; None: their elements are hashed."""
    if isinstance(value, Tensor):
        total.update(_form(value.dtype, value.shape))
        total.update(_memory(value) if known is None else pack("<Q", next(known)))
    elif isinstance(value, dict):
        for name, item in value.items():
            total.update(f"{name}:".encode())
            _update_hash(total, item, known)
    elif isinstance(value, list | tuple):
        total.update(f"{len(value)}:".encode())
        for item in value:
            _update_hash(total, item, known)
    elif isinstance(value, np.ndarray):
        total.update(f"{value.dtype}{list(value.shape)}".encode())
        total.update(np.ascontiguousarray(value).reshape(-1).data.cast("B"))
    else:
        total.update(repr(value).encode())


@lru_cache(1024)
def _form(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{list(shape)}".encode()


def _memory(tensor: Tensor) -> Any:
    """The elements in memory order as an array on the CPU, copied only if they are not dense. Called for every parameter at every step."""
    dense = tensor.detach()
    if not dense.is_cpu:
        dense = dense.to("cpu")
    if not dense.is_contiguous():
        dense = on_device.dense(dense)
    if dense.dtype is torch.bfloat16:
        dense = dense.view(torch.int16)
    return dense.numpy()


def tensor_digests(state: Mapping[str, Tensor], *, shards: int = 1, sharded: Collection[str] = (), algorithm: str = XXH3) -> list[int]:
    """The digest of each tensor of a state_dict in order, as in a trace, whose `weights` combines them.

    Those of `sharded` were split into `shards` parts along the first dimension (as by torch.chunk), each digested separately.
    """
    return [
        combine(begin(_shards(one, shards), algorithm)()) if shards > 1 and name in sharded else begin([one], algorithm)()[0] for name, one in state.items()
    ]


def _shards(tensor: Tensor, shards: int) -> list[Tensor]:
    cut = list(tensor.chunk(shards))
    return [*cut, *[tensor[:0]] * (shards - len(cut))]


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of a state_dict: for each name, sorted, its name, dtype, shape and bytes (row-major)."""
    return state_sha256(state)


def state_sha256(state: Mapping[str, Any]) -> str:
    """The same of tensors and plain values in mappings, lists and tuples: names are paths (`schedule/best`), values are as Python writes them."""
    total = hashlib.sha256()
    for name, value in sorted(_leaves(state), key=itemgetter(0)):
        if isinstance(value, Tensor):
            total.update(f"{name}\0{str(value.dtype).removeprefix('torch.')}\0{','.join(map(str, value.shape))}\0".encode())
            if value.numel():
                total.update(tensor_bytes(value))
        else:
            total.update(f"{name}\0{value!r}\0".encode())
    return total.hexdigest()


def _leaves(value: Any, under: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple) and value:
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from _leaves(item, f"{under}/{name}" if under else str(name))
    else:
        yield under, value
