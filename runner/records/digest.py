"""Digests: xxh3 or that of `on_device` for the trace of each step, SHA-256 for weights."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from operator import itemgetter
from struct import pack
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import on_device
from samewise.runner.records.written import PLAIN, WRITTEN, is_written_whole, written_set

ALGORITHMS = (XXH3, ON_DEVICE) = ("xxh3", on_device.NAME)
"""Digest algorithms of a trace: xxh3 on the CPU, `on_device`'s on other devices."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's elements in row-major order, as bytes on the CPU."""
    flat = (
        tensor.detach()
        .to("cpu")
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
    )
    return flat.numpy().data


def digests(tensors: Iterable[Tensor | None]) -> list[int]:
    """Return the 64-bit xxh3 of each tensor's elements in memory order; 0 for None.

    Tensors of different memory formats differ, even if their elements are equal: a copy into
    row-major order at every step would cost more than the digest.
    """
    return [
        0 if tensor is None else xxhash.xxh3_64_intdigest(_memory(tensor)) for tensor in tensors
    ]


def begin(tensors: Sequence[Tensor | None], algorithm: str) -> Callable[[], list[int]]:
    """Start to digest tensors in their current state, and return a function that reads the digests.

    A digest is 0 for None. With xxh3, device tensors are copied at once.
    """
    if algorithm == ON_DEVICE:
        return on_device.begin(tensors)
    values = digests(tensors)
    return lambda: values


def combine(numbers: Sequence[int]) -> int:
    """Return one digest of several digests, in order."""
    return xxhash.xxh3_64_intdigest(pack(f"<{len(numbers)}Q", *numbers))


def value_digest(value: object) -> int:
    """Return a digest of a batch.

    Args:
        value: Tensors, arrays, numbers and texts in mappings, lists, tuples and objects with
            attributes.

    Raises:
        ConfigError: The batch contains something else, which has no content to compare.
    """
    total = xxhash.xxh3_64()
    for piece in _listed(value):
        if isinstance(piece, Tensor):
            total.update(_form(piece.dtype, piece.shape))
            piece = _memory(piece)
        total.update(piece)
    return total.intdigest()


def begin_value(value: object) -> Callable[[], int]:
    """Start to digest a batch, its tensors on their device.

    Return a function that reads the digest.
    """
    pieces = _listed(value)
    read = on_device.begin([piece for piece in pieces if isinstance(piece, Tensor)])

    def combined() -> int:
        total, numbers = xxhash.xxh3_64(), iter(read())
        for piece in pieces:
            total.update(
                _form(piece.dtype, piece.shape) + pack("<Q", next(numbers))
                if isinstance(piece, Tensor)
                else piece
            )
        return total.intdigest()

    return combined


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_in(item)


def entries(value: Any) -> dict[Any, Any]:
    """Return the entries of a mapping or a dataclass by name; empty for any other value."""
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return (
        {field.name: getattr(value, field.name) for field in fields(value)}
        if is_dataclass(value) and not isinstance(value, type)
        else {}
    )


def _listed(value: Any) -> list[Any]:
    """Return the pieces of a value as bytes, arrays and dense tensors."""
    pieces: list[Any] = []
    after_number = False
    try:
        for piece in _pieces(value):
            # A comma separates a number from a number or list after it: 1, 11 is not 11, 1
            if after_number and isinstance(piece, str | int):
                pieces.append(b",")
            after_number = isinstance(piece, str)
            pieces.append(
                piece.encode()
                if isinstance(piece, str)
                else b"%d:" % piece
                if isinstance(piece, int)
                else piece
            )
    except RecursionError:
        raise _undigested(
            f"of type {type(value).__qualname__}, nested too deeply or containing itself", ""
        ) from None
    return pieces


def _pieces(value: Any, name: str = "") -> Iterator[Any]:
    """Yield a value's pieces: bytes, arrays, dense tensors, texts of numbers, lengths of lists.

    `name` is the key of the entry that holds the value.
    """
    if type(value) in PLAIN:
        yield (
            repr(value)
            if type(value) in (int, float, complex) and name not in _NOT_SEPARATED
            else repr(value).encode()
        )
    elif isinstance(value, Tensor):
        yield from _parts(value, kind, name) if (kind := tensor_kind(value)) else (value,)
    elif isinstance(value, dict):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(key, str):
                yield f"{key}:".encode()
            else:
                # No UTF-8 text contains this byte
                yield b"\xff"
                yield from _pieces(key, name)
                yield b":"
            yield from _pieces(item, str(key))  # pyright: ignore[reportUnknownArgumentType]
        yield from _attributes(value, name)
    elif isinstance(value, list | tuple):
        # The length tells [[1], 2] from [[1, 2]]
        yield len(value)  # pyright: ignore[reportUnknownArgumentType]
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _pieces(item, name)
        yield from _attributes(value, name)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{list(value.shape)}".encode()
        # Such an array holds addresses, which differ in each process
        if value.dtype.hasobject:
            yield from _pieces(value.reshape(-1).tolist(), name)
        elif value.nbytes:
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        if isinstance(value, np.ma.MaskedArray):
            yield from _pieces([np.ma.getmaskarray(value), value.fill_value], name)  # pyright: ignore[reportUnknownMemberType]
    elif type(value) in (set, frozenset) and all(map(is_written_whole, value)):
        yield written_set(value).encode()
    elif is_written_whole(value):
        # An address differs in each process
        if " at 0x" in (text := repr(value)):
            raise _undigested(f"of type {type(value).__qualname__}", name)
        yield text.encode()
    elif (content := _content(value)) is None:
        raise _undigested(f"of type {type(value).__qualname__}", name)
    else:
        yield f"{type(value).__qualname__}:".encode()
        yield from _pieces(content, name)


_NOT_SEPARATED = ("image_id", "file_size")
"""Entries whose numbers are digested without commas.

Earlier traces and fingerprints of detection did so, and the images that these numbers belong to are
digested too.
"""


def _undigested(kind: str, name: str) -> ConfigError:
    place = f"{name!r} in a sample or batch" if name else "a sample or batch"
    return ConfigError(
        Problem(
            "dataset, recipe",
            f"{place} is {kind}, whose content cannot be compared bit by bit",
            expected="tensors, arrays, numbers and texts; mappings, lists, tuples, dataclasses and other "
            "objects that have these as attributes",
        )
    )


def tensor_kind(tensor: Tensor) -> str:
    """Name the kind of a tensor that is not simply elements in memory, such as `sparse_coo`.

    Empty for a dense, strided tensor.
    """
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
        return ""
    return (
        "quantised"
        if tensor.is_quantized
        else "nested"
        if tensor.is_nested
        else str(tensor.layout).removeprefix("torch.")
    )


def _attributes(value: Any, name: str) -> Iterator[Any]:
    """Yield the pieces of the attributes that a subclass of dict, list or tuple adds."""
    if (
        type(value) not in (dict, list, tuple)
        and (state := object.__getstate__(value))
        and state is not value
    ):
        yield from _pieces(state, name)


def _content(value: Any) -> Any:
    """Return an object's array, elements, entries or pickled attributes; None if it has none."""
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__array__"):
        return _array_content(value)
    if isinstance(value, deque | KeysView | ValuesView | ItemsView):
        return [*value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, re.Pattern):
        return [value.pattern, value.flags]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    # An object that cannot be pickled raises TypeError
    with suppress(TypeError):
        # An instance of a subclass of a number, text or time may have attributes of its own
        if not WRITTEN.isdisjoint(type(value).__mro__):
            return [*value.__reduce_ex__(4)[1:], object.__getstate__(value)]
        return entries(value) or value.__getstate__()
    return None


def _array_content(value: Any) -> Any:
    """Return an object's array, with what the array leaves out.

    That is the mode, palette and transparency of a Pillow picture, and the axes and name of a
    pandas object.
    """
    content = np.asarray(value)
    if hasattr(value, "getpalette") and getattr(value, "mode", "") in (
        "P",
        "PA",
        "La",
        "RGBa",
        "RGBX",
        "CMYK",
        "YCbCr",
        "HSV",
        "LAB",
    ):
        return [content, value.mode, value.getpalette(None), value.info.get("transparency")]
    if isinstance(axes := getattr(value, "axes", None), list) and all(
        hasattr(axis, "names") for axis in axes
    ):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        return [
            content,
            [(np.asarray(axis), *axis.names) for axis in axes],
            getattr(value, "name", None),
        ]  # pyright: ignore[reportUnknownVariableType]
    return content


def _parts(tensor: Tensor, kind: str, name: str) -> Iterator[Any]:
    """Yield the pieces of a sparse or nested tensor; raise a ConfigError for any other kind."""
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
"""Methods that return the dense parts of a sparse tensor, by its kind."""


@lru_cache(1024)
def _form(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{list(shape)}".encode()


def _memory(tensor: Tensor) -> Any:
    """Return the elements in memory order, as an array on the CPU.

    Copy them only if they are not dense.
    """
    # Called for every parameter at every step, so each of these copies only where it must
    dense = tensor.detach()
    if not dense.is_cpu:
        dense = dense.to("cpu")
    if not dense.is_contiguous():
        dense = on_device.dense(dense)
    # NumPy has no bfloat16; the bits are the same in an int16
    if dense.dtype is torch.bfloat16:
        dense = dense.view(torch.int16)
    try:
        return dense.numpy()
    except (RuntimeError, TypeError):
        # NumPy has no such dtype, or the tensor is a lazy conjugate or negative
        return dense.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()


def tensor_digests(state: Mapping[str, Tensor]) -> list[int]:
    """Return the digest of each tensor of a state_dict in order, as in a trace on the CPU."""
    return digests(list(state.values()))


def weights_sha256(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a state_dict: each name, sorted, with its dtype, shape and bytes."""
    return state_sha256(state)


def state_sha256(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of tensors and plain values in mappings, lists and tuples.

    Names are paths (`schedule/best`); plain values are hashed as their repr.
    """
    total = hashlib.sha256()
    # The order in which names were added does not count
    for name, value in sorted(_leaves(state), key=itemgetter(0)):
        if isinstance(value, Tensor):
            dtype, shape = str(value.dtype).removeprefix("torch."), ",".join(map(str, value.shape))
            total.update(f"{name}\0{dtype}\0{shape}\0".encode())
            if value.numel():
                total.update(tensor_bytes(value))
        else:
            total.update(f"{name}\0{value!r}\0".encode())
    return total.hexdigest()


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple) and value:
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from _leaves(item, f"{prefix}/{name}" if prefix else str(name))
    else:
        yield prefix, value
