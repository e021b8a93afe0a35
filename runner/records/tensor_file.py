"""Tensors by name in a file without code: the .safetensors format (huggingface.co/docs/safetensors, "Format")."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from samewise.runner.errors import first_line
from samewise.runner.processes.memory import free_memory
from samewise.runner.records.digest import tensor_bytes
from samewise.runner.records.files import write_atomically

KINDS: Final = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Kinds of numbers, as the format calls them."""
_LONGEST_HEADER: Final = 100_000_000
"""Bytes; the format's own limit."""
_CALLED: Final = {kind: name for name, kind in KINDS.items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, on the CPU; ValueError if it is not such a file or is cut short, OSError if it cannot be read."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > _LONGEST_HEADER:
                raise ValueError("its header is longer than the format allows")
            header = json.loads(file.read(start - 8))
            if not isinstance(header, dict):
                raise ValueError("its header is not a mapping")
            header.pop("__metadata__", None)
            if start + sum(max(0, one["data_offsets"][1] - one["data_offsets"][0]) for one in header.values()) != size:
                raise ValueError("its tensors overlap, or do not have the sizes that its header gives")
            if size > (free := free_memory()):
                raise ValueError(f"its tensors take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory is free")
            file.seek(0)
            held = bytearray(size)
            file.readinto(held)
        return {name: _tensor(held, start, **one) for name, one in header.items()}
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, RecursionError) as error:
        raise ValueError(first_line(error)) from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write tensors in row-major order; the same tensors give the same bytes. `about` becomes the header's `__metadata__`.

    ValueError if the format does not support a dtype.
    """
    header, parts, at = dict[str, Any]({"__metadata__": dict(about)} if about else {}), list[bytes](), 0
    for name in sorted(tensors):
        tensor = tensors[name]
        if tensor.dtype not in _CALLED:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which a .safetensors file cannot hold")
        parts.append(bytes(tensor_bytes(tensor)))
        header[name] = {"dtype": _CALLED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(parts[-1])]}
        at += len(parts[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_atomically(path, len(text).to_bytes(8, "little") + text + b"".join(parts))


def _tensor(held: bytearray, start: int, *, dtype: str, shape: Sequence[int], data_offsets: Sequence[int]) -> Tensor:
    first, last = data_offsets
    if not 0 <= first <= last <= len(held) - start:
        raise ValueError("the file is shorter than its header says")
    if last == first and 0 not in shape:
        raise ValueError(f"a tensor of shape {list(shape)} has no bytes")
    return torch.frombuffer(held[start + first : start + last], dtype=KINDS[dtype]).reshape(shape) if last > first else torch.empty(shape, dtype=KINDS[dtype])
