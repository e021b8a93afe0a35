"""The one door to the bytes of shards: everything that reads a shard goes through here."""

import builtins
import os
from collections.abc import Collection, Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import BinaryIO, NamedTuple

from samewise.runner.errors import DataError, Problem, first_few, first_line

_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".br", ".snappy", ".lz4")
"""Endings of compressed files."""


class File(NamedTuple):
    """A shard as it lies in its folder."""

    name: str
    size: int
    mtime: int
    """Modification time in nanoseconds."""


@contextmanager
def readable(path: str) -> Generator[None]:
    """Raise a DataError that names the file, in place of an error of reading or unpacking it."""
    try:
        yield
    # The last four are those of pyarrow and of unpacking
    except (OSError, ValueError, KeyError, TypeError, IndexError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(Problem(path, f"cannot be read, or is damaged: {reason}")) from None


def is_folder(place: str) -> bool:
    """Return whether a place is a folder."""
    return os.path.isdir(place)


def list_files(folder: str, endings: Collection[str]) -> list[File]:
    """List the files directly in a folder that have one of the endings, sorted by name.

    Raises:
        DataError: The folder cannot be read, or has no such file.
    """
    with readable(folder):
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        chosen = [name for name in names if os.path.splitext(name)[1] in endings]
        states = [os.stat(f"{folder}/{name}") for name in chosen]
    splits = [(name, *os.path.splitext(name)) for name in names]
    packed = [
        name
        for name, inner, ending in splits
        if ending in _PACKED and inner.endswith((*endings,)) and inner not in chosen
    ]
    DataError.raise_if(
        packed,
        folder,
        "has compressed shards, in which no sample can be read alone",
        packed[:5],
        hint="unpack them here",
    )
    if not chosen:
        raise DataError(
            Problem(
                folder,
                f"has no shards ({first_few(names, 5) or 'it is empty'})",
                expected=f"files {', '.join(endings)} directly in this folder, or in train, valid "
                "and test below it",
            )
        )
    return [File(name, x.st_size, x.st_mtime_ns) for name, x in zip(chosen, states, strict=True)]


def read(path: str, offset: int, length: int) -> bytes:
    """Read a range of bytes of a shard.

    Raises:
        ValueError: The shard ends before the range.
    """
    raw = os.pread(_opened(path).fileno(), length, offset)
    if len(raw) < length:
        raise ValueError(f"it ends at byte {offset + len(raw):,}, before {offset + length:,}")
    return raw


def open(path: str) -> BinaryIO:
    """Open a shard as a file to read from any byte on.

    Only the bytes that are read, and few behind them, are fetched. It may be opened often.
    """
    return builtins.open(path, "rb")


@lru_cache(maxsize=64)
def _opened(path: str) -> BinaryIO:
    return open(path)
