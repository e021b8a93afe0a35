"""MDS shards of mosaicml-streaming and chunks of litData: a table of offsets, then the samples.

A file begins with the number of samples N, uint32, and N + 1 offsets, uint32: where each sample
starts, and where the last one ends. A sample begins with the sizes, uint32, of those values whose
column has no fixed size; the values follow in the order of the columns.
"""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, final

import numpy as np

from samewise.runner.errors import DataError, Problem
from samewise.runner.shards import storage
from samewise.runner.shards.reader import (
    KEY,
    Label,
    Reader,
    Sample,
    require_column,
    require_label,
)

_HEAD = 4


class _Column(NamedTuple):
    """A column: its values' encoding, and their size in bytes if it is fixed."""

    name: str
    encoding: str
    size: int | None


@final
class ChunkReader(Reader):
    """Reads a sample's bytes by its offset and length.

    Args:
        columns: Returns the columns of a file.
    """

    def __init__(self, columns: Callable[[str], Sequence[_Column]]) -> None:
        self._columns = columns

    def scan(self, path: str, label: Label) -> Iterator[Sequence[Sample]]:
        columns, rows = self._columns(path), list[Sample]()
        require_label(path, label, [x.name for x in columns])
        with storage.open(path) as file:
            count = int.from_bytes(file.read(_HEAD), "little")
            offsets = np.frombuffer(file.read(_HEAD * (count + 1)), "<u4").tolist()
            if len(offsets) != count + 1:
                raise ValueError(f"it ends before the {count + 1:,} offsets of its samples")
            file.seek(offsets[0])
            for row, (start, stop) in enumerate(pairwise(offsets)):
                fields = _decode(file.read(stop - start), columns, label.columns)
                key = str(fields.get(KEY, f"{os.path.basename(path)}/{row}"))
                text = label.text(fields, f"{path}, sample {row}")
                rows.append(Sample(key, start, stop - start, text))
        yield rows

    def read(
        self, path: str, offset: int, length: int, fields: Sequence[str], *, units: int
    ) -> dict[str, Any]:
        columns = self._columns(path)
        for name in fields:
            require_column(path, name, [x.name for x in columns])
        values = _decode(storage.read(path, offset, length), columns, (*fields, KEY))
        return {KEY: f"sample at byte {offset:,}"} | values


@lru_cache(maxsize=1024)
def mds_columns(path: str) -> Sequence[_Column]:
    """Return the columns of an MDS shard, which stand between the offsets and the first sample."""
    count, first = np.frombuffer(storage.read(path, 0, 2 * _HEAD), "<u4").tolist()
    start = _HEAD * (count + 2)
    described = json.loads(storage.read(path, start, first - start))
    entries = (described[f"column_{x}"] for x in ("names", "encodings", "sizes"))
    return [_Column(*x) for x in zip(*entries, strict=True)]


def litdata_columns(path: str) -> Sequence[_Column]:
    """Return the columns of a chunk of litData, from the folder's index.json.

    They are called as the keys of a sample, or 0, 1 and so on if it is a tuple; within another
    container, as `outer.inner`.
    """
    return _listed_columns(f"{os.path.dirname(path)}/index.json")


@lru_cache(maxsize=1024)
def _listed_columns(path: str) -> Sequence[_Column]:
    with storage.readable(path), storage.open(path) as file:
        described = {"item_loader": "PyTreeLoader"} | json.load(file)["config"]
        names = _leaves(json.loads(described["data_spec"])[1])
        columns = [_Column(*x, None) for x in zip(names, described["data_format"], strict=True)]
    packed = [described.get(x) for x in ("compression", "encryption", "item_loader")]
    DataError.raise_if(
        packed != [None, None, "PyTreeLoader"],
        path,
        "describes chunks that are not read",
        packed,
        "chunks by litdata.optimize with no compression, encryption or item_loader",
    )
    return columns


def _leaves(tree: Any, prefix: str = "") -> list[str]:
    """Return the names of the leaves of a tree of containers, as litData writes it."""
    if tree["type"] is None:
        return [prefix.removesuffix(".")]
    children = tree["children_spec"]
    pairs = zip(json.loads(tree["context"]) or range(len(children)), children, strict=True)
    return [x for key, child in pairs for x in _leaves(child, f"{prefix}{key}.")]


def _decode(raw: bytes, columns: Sequence[_Column], names: Collection[str]) -> dict[str, Any]:
    """Return a sample's values of the requested columns, as far as they exist."""
    place, values = _HEAD * sum(x.size is None for x in columns), dict[str, Any]()
    sizes = iter(np.frombuffer(raw[:place], "<u4").tolist())
    for column in columns:
        stop = place + (next(sizes) if column.size is None else column.size)
        if column.name in names:
            # image:jpg
            if (kind := column.encoding.partition(":")[0]) not in _DECODERS:
                reason, expected = "has an encoding that is not read", ", ".join(_DECODERS)
                raise DataError(Problem(f"column {column.name}", reason, column.encoding, expected))
            values[column.name] = _DECODERS[kind](raw[place:stop])
        place = stop
    if place != len(raw):
        raise ValueError(f"a sample has {len(raw):,} bytes, its values {place:,}")
    return values


def _number(kind: str, raw: bytes) -> Any:
    return np.frombuffer(raw, kind)[0].item()


def _netpbm(raw: bytes) -> bytes:
    """Return pixels of PIL as a file with a header."""
    width, height, length = np.frombuffer(raw[:12], "<u4").tolist()
    if (mode := raw[12 : 12 + length]) not in (b"RGB", b"L"):
        raise ValueError(f"it has an image in {mode.decode()}, not RGB or L")
    return f"P{5 + (length > 1)} {width} {height} 255\n".encode() + raw[12 + length :]


_FILES = ("bytes", "jpeg", "png", "image", "audio", "file", "tifffile", "tiff")
_TEXTS = ("str", "text", "str_int", "str_float", "str_decimal")
# Of NumPy's types `int` and `float` have 8 bytes
_NUMBERS = (
    *("bool", "int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float", "float16", "float32", "float64"),
)
_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(_FILES, bytes),
    **dict.fromkeys(_TEXTS, bytes.decode),
    **{kind: partial(_number, kind) for kind in _NUMBERS},
    "json": json.loads,
    "pil": _netpbm,
}
"""Functions by a column's encoding."""
