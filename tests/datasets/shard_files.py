"""Writes samples into shards of each format."""

import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

Rows = Sequence[Mapping[str, Any]]
"""Fields by name, the key as `__key__`: bytes, texts, whole numbers, or what JSON can say."""


def packed(value: Any) -> bytes:
    return value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else json.dumps(value).encode()


def tar(place: Path, rows: Rows, *, form: int = tarfile.GNU_FORMAT, mtime: float = 0) -> None:
    with tarfile.open(place, "w", format=form) as archive:
        for row in rows:
            for ending, value in row.items():
                if ending != "__key__":
                    header = tarfile.TarInfo(f"{row['__key__']}.{ending}")
                    header.size, header.mtime = len(packed(value)), mtime
                    archive.addfile(header, io.BytesIO(packed(value)))


def chunk(place: Path, rows: list[list[bytes]], described: bytes = b"") -> None:
    """What mosaicml-streaming and litData write: the offsets of samples; before each, the sizes of its values."""
    bodies = [np.array([*map(len, row)], "<u4").tobytes() + b"".join(row) for row in rows]
    offsets = np.cumsum([4 * (len(rows) + 2) + len(described), *map(len, bodies)]).astype("<u4")
    place.write_bytes(np.uint32(len(rows)).tobytes() + offsets.tobytes() + described + b"".join(bodies))


def mds(place: Path, rows: Rows, encoding: str = "bytes") -> None:
    names = [*rows[0]]
    encodings = [encoding if isinstance(x, bytes) else "str" if isinstance(x, str) else "json" for x in rows[0].values()]
    described = {"column_names": names, "column_encodings": encodings, "column_sizes": [None] * len(names)}
    chunk(place, [[*map(packed, row.values())] for row in rows], json.dumps(described).encode())


def litdata(place: Path, rows: Rows, **others: str) -> None:
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "builtins.dict", "context": json.dumps([*rows[0]]), "children_spec": [leaf] * len(rows[0])}
    encodings = ["bytes" if isinstance(x, bytes) else "str" for x in rows[0].values()]
    config = {"compression": None, "data_format": encodings, "data_spec": json.dumps([1, tree]), **others}
    place.with_name("index.json").write_text(json.dumps({"config": config}))
    chunk(place, [[*map(packed, row.values())] for row in rows])


def table(rows: Rows) -> pa.Table:
    """With contents as Hugging Face's library has them."""
    return pa.Table.from_pylist([{x: {"bytes": y, "path": None} if isinstance(y, bytes) else y for x, y in row.items()} for row in rows])


def arrow(place: Path, rows: Rows, kind: Callable[..., Any]) -> None:
    plain = pa.Table.from_pylist([*rows])
    with kind(str(place), plain.schema) as writer:
        writer.write_table(plain, max_chunksize=3)


FORMATS: dict[str, tuple[str, Callable[[Path, Rows], Any]]] = {
    "tar": (".tar", tar),
    "tar as webdataset writes it": (".tar", lambda *given: tar(*given, form=tarfile.PAX_FORMAT, mtime=12.5)),
    "parquet": (".parquet", lambda place, rows: parquet.write_table(table(rows), place, row_group_size=4)),
    "arrow stream": (".arrow", lambda *given: arrow(*given, pa.ipc.new_stream)),
    "arrow file": (".arrow", lambda *given: arrow(*given, pa.ipc.new_file)),
    "mds": (".mds", mds),
    "litdata": (".bin", litdata),
}


def write(folder: Path, rows: Rows, name: str = "tar", *, size: int = 10) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ending, how = FORMATS[name]
    for start in range(0, len(rows), size):
        how(folder / f"{start:04}{ending}", rows[start : start + size])
    return folder


def rows_of(samples: Sequence[tuple[str, str, bytes]], name: str, *, prefix: str = "", labels: str = "cls") -> Rows:
    """Rows of samples with a name, a label and a content, as they are usual in a format."""
    if not name.startswith("tar"):
        return [{"__key__": name, "image": raw, "label": label} for name, label, raw in samples]
    split = [(prefix + name.rpartition(".")[0], name.rpartition(".")[2], label, raw) for name, label, raw in samples]
    return [{"__key__": key, ending: raw, labels: label if labels == "cls" else {"kind": {}, "label": label}} for key, ending, label, raw in split]
