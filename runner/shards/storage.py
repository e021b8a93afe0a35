"""The one door to the bytes of shards: everything that reads a shard goes through here.

A place is a path of the local disk, or an address such as s3://bucket/prefix.
"""

import builtins
import os
import re
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any, BinaryIO, NamedTuple

from samewise.runner.errors import DataError, Problem, first_few, first_line

_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".br", ".snappy", ".lz4")
"""Endings of compressed files."""


class File(NamedTuple):
    """A shard as it lies in its folder."""

    name: str
    size: int
    version: int | str
    """Modification time in nanoseconds; in a store, what it gives for it."""


@contextmanager
def readable(path: str) -> Generator[None]:
    """Raise a DataError that names the file, in place of an error of reading or unpacking it."""
    try:
        yield
    # The last four are those of pyarrow and of unpacking
    except (OSError, ValueError, KeyError, TypeError, IndexError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        is_whole = isinstance(error, FileNotFoundError | PermissionError)
        raise DataError(
            Problem(path, f"cannot be read{', or is damaged' * (not is_whole)}: {reason}")
        ) from None


def stores() -> Any:
    """Return the module of object stores, whose import takes a while."""
    from samewise.runner.shards import stores

    return stores


def is_remote(place: str) -> bool:
    """Return whether a place is in an object store."""
    return "://" in place


def list_folders(place: str) -> set[str]:
    """Return the names of the folders in a place; none if there is no such place.

    Raises:
        TrainingError: The store does not answer.
    """
    with suppress(OSError):
        if is_remote(place):
            return {name for name, file in stores().list_folder(place).items() if file is None}
        return {entry.name for entry in os.scandir(place) if entry.is_dir()}
    return set()


def ending_of(name: str) -> str:
    """Return the ending of a file's name, without the number of a shard as in `-00000-of-00010`."""
    return re.sub(r"-\d+-of-\d+$", "", os.path.splitext(name)[1])


def list_files(folder: str, endings: Collection[str]) -> list[File]:
    """List the files directly in a folder that have one of the endings, sorted by name.

    Raises:
        DataError: The folder cannot be read, or has no such file.
    """
    with readable(folder):
        entries = (
            stores().list_folder(folder) if is_remote(folder) else dict.fromkeys(os.listdir(folder))
        )
        names = sorted(name for name in entries if not name.startswith("."))
        chosen = [name for name in names if ending_of(name) in endings]
        files = [File(name, *(entries[name] or _state(f"{folder}/{name}"))) for name in chosen]
    packed = [
        name
        for name, inner, ending in ((name, *os.path.splitext(name)) for name in names)
        if ending in _PACKED and inner.endswith((*endings,)) and inner not in chosen
    ]
    DataError.raise_if(
        packed,
        folder,
        "has compressed shards, in which no sample can be read alone",
        packed[:5],
        hint="unpack them: gunzip, bunzip2, unxz or unzstd",
    )
    if not chosen:
        raise DataError(
            Problem(
                folder,
                f"has no shards ({first_few(names, 5) or 'it is empty'})",
                expected=f"files {', '.join(endings)} directly in this folder, or in train, valid "
                "and test below it",
                hint="dataset=image_folder dataset.root=FOLDER reads images in train/CLASS, "
                "dataset=class_folders in CLASS"
                if list_folders(folder)
                else "",
            )
        )
    return files


def read(path: str, offset: int, length: int) -> bytes:
    """Read a range of bytes of a shard.

    Raises:
        ValueError: The shard ends before the range.
    """
    raw = (
        stores().read(path, offset, length)
        if is_remote(path)
        else os.pread(_opened(path).fileno(), length, offset)
    )
    if len(raw) < length:
        raise ValueError(f"it ends at byte {offset + len(raw):,}, before {offset + length:,}")
    return raw


def open(path: str) -> BinaryIO:
    """Open a shard as a file to read from any byte on.

    Only the bytes that are read, and few behind them, are fetched. It may be opened often.
    """
    return stores().open_file(path) if is_remote(path) else builtins.open(path, "rb")


def contents(path: str, size: int) -> Iterator[bytes]:
    """Yield the blocks of a shard, one after the other; those in a store are kept on the disk."""
    if is_remote(path):
        yield from stores().contents(path, size)
    else:
        with open(path) as file:
            yield from iter(partial(file.read, 1 << 22), b"")


def _state(path: str) -> tuple[int, int]:
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


@lru_cache(maxsize=64)
def _opened(path: str) -> BinaryIO:
    return open(path)
