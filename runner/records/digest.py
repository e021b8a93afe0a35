"""Digests of tensors: xxh3 for the trace of each step (on a device that of `on_device`), SHA-256 for what is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from operator import itemgetter
from struct import pack
from types import NoneType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import on_device

ALGORITHMS = (XXH3, ON_DEVICE) = ("xxh3", on_device.NAME)
"""What tensors in a trace are digested by: xxh3 on the CPU."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order, as bytes on the CPU."""
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
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


def value_digest(value: object) -> int:
    """A digest of a batch: tensors, arrays, numbers and texts in mappings, lists, tuples, and objects with attributes. ConfigError for what has none."""
    total = xxhash.xxh3_64()
    for piece in _listed(value):
        if isinstance(piece, Tensor):
            total.update(_form(piece.dtype, piece.shape))
            piece = _memory(piece)
        total.update(piece)
    return total.intdigest()


def begin_value(value: object) -> Callable[[], int]:
    """Start to digest a batch, its tensors on their device; return a function that reads the digest."""
    pieces = _listed(value)
    read = on_device.begin([piece for piece in pieces if isinstance(piece, Tensor)])

    def combined() -> int:
        total, known = xxhash.xxh3_64(), iter(read())
        for piece in pieces:
            total.update(_form(piece.dtype, piece.shape) + pack("<Q", next(known)) if isinstance(piece, Tensor) else piece)
        return total.intdigest()

    return combined


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item)


def entries(value: Any) -> dict[Any, Any]:
    """The entries of a mapping or a dataclass by name; empty for any other value."""
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return {one.name: getattr(value, one.name) for one in fields(value)} if is_dataclass(value) and not isinstance(value, type) else {}


def _listed(value: Any) -> list[Any]:
    try:
        return list(_pieces(value))
    except RecursionError:
        raise _undigested(f"a {type(value).__qualname__} that contains itself", "") from None


def _pieces(value: Any, name: str = "") -> Iterator[Any]:
    """What a digest of a value is taken of, in order: bytes, arrays and dense tensors. `name`: of the entry that the value is."""
    if type(value) in _PLAIN:
        yield repr(value).encode()
    elif isinstance(value, Tensor):
        yield from _parts(value, kind, name) if (kind := tensor_kind(value)) else (value,)
    elif isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield f"{key}:".encode()
            yield from _pieces(item, str(key))  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, list | tuple):
        yield f"{len(value)}:".encode()  # pyright: ignore[reportUnknownArgumentType]
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _pieces(item, name)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{list(value.shape)}".encode()
        if value.dtype.hasobject:
            yield from _pieces(value.reshape(-1).tolist(), name)
        elif value.nbytes:
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    elif _is_written_whole(value):
        if " at 0x" in (text := repr(value)):
            raise _undigested(f"of type {type(value).__qualname__}", name)
        yield text.encode()
    elif (content := _content(value)) is None:
        raise _undigested(f"of type {type(value).__qualname__}", name)
    else:
        yield f"{type(value).__qualname__}:".encode()
        yield from _pieces(content, name)


def _undigested(kind: str, name: str) -> ConfigError:
    where = f"{name!r} in a sample or batch" if name else "a sample or batch"
    known = "tensors, arrays, numbers and texts; mappings, lists, tuples, dataclasses and other objects that have these as attributes"
    return ConfigError(Problem("dataset, recipe", f"{where} is {kind}, whose content cannot be compared bit by bit", expected=known))


def tensor_kind(tensor: Tensor) -> str:
    """In one word, what a tensor is that is not simply elements in memory: `quantised`, `nested`, `sparse_coo`, ...; empty if it is."""
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
        return ""
    return "quantised" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")


_PLAIN = frozenset((int, float, str, bool, bytes, complex, NoneType))


def _is_written_whole(value: Any) -> bool:
    """Whether a value's repr leaves out nothing: it has no tensors or arrays, which are shortened, and no object or field that is not written."""
    if type(value) in _PLAIN or isinstance(value, type | np.generic) or getattr(type(value), "repr_is_whole", False):
        return True
    if isinstance(value, dict | list | tuple | set | frozenset):
        return all(map(_is_written_whole, value.values() if isinstance(value, dict) else value))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, Tensor | np.ndarray) or type(value).__repr__ is object.__repr__:
        return False
    return _is_written_whole(_content(value)) and not (is_dataclass(value) and not all(one.repr for one in fields(value)))


def _content(value: Any) -> Any:
    """What an object consists of: an array, its entries, or its attributes as pickle saves them; None if it has none."""
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__array__"):
        return np.asarray(value)
    with suppress(TypeError):  # of what cannot be pickled
        return entries(value) or value.__getstate__()
    return None


def _parts(tensor: Tensor, kind: str, name: str) -> Iterator[Any]:
    """The pieces of a tensor that is sparse or nested; ConfigError if it is of another kind."""
    if kind == "nested":
        yield from _pieces(list(tensor.detach().unbind()))
        return
    names = _SPARSE.get(kind)
    if names is None:
        raise _undigested(f"a {kind} tensor", name)
    yield f"{kind}{list(tensor.shape)}".encode()
    yield from (getattr(tensor.detach(), part)() for part in names)


_SPARSE = {
    "sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(("sparse_csr", "sparse_bsr"), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(("sparse_csc", "sparse_bsc"), ("ccol_indices", "row_indices", "values")),
}
"""The methods that give the dense tensors which a sparse one consists of."""


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
    try:
        return dense.numpy()
    except (RuntimeError, TypeError):  # NumPy has no such type, or torch computes the elements only when they are read: the conjugate, the negative
        return dense.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()


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
