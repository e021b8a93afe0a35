"""Reads the test vectors of an export, a .safetensors file: eight bytes with the length of a header, the header, which is JSON, and the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
KINDS = {
    "F64": np.float64,
    "F32": np.float32,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def read_vectors(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays of the file, and what its header says: names of inputs, outputs and classes, one a line, and the tolerance."""
    held = path.read_bytes()
    start = 8 + int.from_bytes(held[:8], "little")
    if len(held) < 8 or start > len(held):
        raise ValueError(f"{path} is cut short")
    header = json.loads(held[8:start])
    about = header.pop("__metadata__")
    found = Arrays()
    for name, said in header.items():
        first, last = said["data_offsets"]
        if start + last > len(held):
            raise ValueError(f"{path} is cut short")
        found[name] = np.frombuffer(
            held[start + first : start + last], KINDS[said["dtype"]]
        ).reshape(said["shape"])
    return found, about
