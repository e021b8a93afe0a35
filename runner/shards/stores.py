"""Files in an object store, by fsspec: read in blocks, which are kept in the cache."""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, BinaryIO, cast, final

import fsspec
import xxhash
from fsspec.spec import AbstractBufferedFile

from samewise.runner.errors import ConfigError, DataError, Problem, TrainingError, first_line
from samewise.runner.shards import cache

TRIES, LIMIT_S = 6, 60.0
"""Times that a request is tried, and seconds for each."""
_READERS, _AHEAD = 8, "samewise reads ahead"
"""Threads of a process that read ahead, and their name."""
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_VERSIONS = ("ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
"""Names under which stores give an object's version or time."""
_LASTING = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Errors of botocore that no further try mends, besides those of permissions."""
_FILES = dict[str, tuple[int, Sequence[str]]]()
"""Size and hashes of the blocks, by file."""


def list_folder(place: str) -> dict[str, tuple[int, str] | None]:
    """Return size and version of each file in a folder, by name; None for a folder.

    Raises:
        OSError: The folder does not exist, or may not be read.
        TrainingError: The store does not answer.
    """
    entries = {x["name"].rstrip("/").rpartition("/")[2]: x for x in _call(place, "ls", detail=True)}
    return {
        name: (entry["size"], str(next(entry[x] for x in _VERSIONS if x in entry)))
        if entry["type"] == "file"
        else None
        for name, entry in entries.items()
    }


def expect(path: str, size: int, hashes: Sequence[str]) -> None:
    """Note a file's size and its blocks' hashes, before it is read."""
    _FILES[path] = size, hashes


def contents(path: str, size: int | None = None) -> Iterator[bytes]:
    """Yield the blocks of a file as they are now in the store, and keep them."""
    total: int = _call(path, "info")["size"] if size is None else size
    for start in range(0, total, cache.BLOCK):
        content = _request(path, start, min(start + cache.BLOCK, total))
        cache.keep(xxhash.xxh3_128_hexdigest(content), content)
        yield content


def read(path: str, offset: int, length: int) -> bytes:
    """Read a range of bytes of a file, or what there is of it."""
    stop = min(offset + length, _FILES[path][0])
    return b"".join(
        _read_block(
            path, number, max(offset - number * cache.BLOCK, 0), stop - number * cache.BLOCK
        )
        for number in range(offset // cache.BLOCK, -(-stop // cache.BLOCK))
    )


def open_file(path: str) -> BinaryIO:
    """Open a file to read from any byte on. One that was not announced by `expect` is small."""
    return cast(BinaryIO, _File(path)) if path in _FILES else BytesIO(b"".join(contents(path)))


@final
class _File(AbstractBufferedFile):
    DEFAULT_BLOCK_SIZE = 1 << 16

    def __init__(self, path: str) -> None:
        super().__init__(None, path, size=_FILES[path][0])

    def _fetch_range(self, start: int, end: int) -> bytes:
        return read(self.path, start, end - start)


def receive(place: str, target: Path) -> None:
    """Bring the files of an index, if the store has them: those that `publish` has written.

    Args:
        place: The index in the store, without an ending.
        target: Its file of the shards on the disk; that of the samples lies beside it.
    """
    draft, rows = target.with_name("received.shards"), target.with_name("received.samples")
    with suppress(OSError):
        draft.write_bytes(b"".join(contents(f"{place}.index")))
        with rows.open("wb") as file:
            version = xxhash.xxh3_64_hexdigest(draft.read_bytes())
            file.writelines(contents(f"{place}.{version}.rows"))
        os.replace(rows, target.with_suffix(".samples"))
        os.replace(draft, target)


def publish(target: Path, place: str) -> str:
    """Write the files of an index into the store, if this user may; arguments as of `receive`.

    The name of the file of samples says to which file of shards it belongs. An index on a disk has
    other names, so that neither is taken for the other where files are copied.

    Returns:
        Where the index lies: in the store, or else on the disk.
    """
    content = target.read_bytes()
    rows = f"{xxhash.xxh3_64_hexdigest(content)}.rows"
    try:
        store, path = fsspec.url_to_fs(place, use_listings_cache=False)
        # The index is written last, so if it is there, the rows are too
        if not store.exists(f"{path}.index") or store.cat_file(f"{path}.index") != content:
            for ending, source in ((rows, ".samples"), ("index", ".shards")):
                store.put_file(str(target.with_suffix(source)), f"{path}.{ending}")
    except Exception as error:
        print(f"the index is not written to {place}: {first_line(error)}", file=sys.stderr)
        return str(target)
    return f"{place}.index"


def read_ahead(work: Sequence[Callable[[], object]]) -> float:
    """Do a batch's work in threads, after earlier work.

    Returns:
        How many such batches of work are waiting for a thread.
    """
    queue = _queue(os.getpid())
    waiting = queue.qsize() / len(work)
    for part in work:
        queue.put(part)
    return waiting


@lru_cache(maxsize=1)
def _queue(pid: int) -> SimpleQueue[Callable[[], object]]:
    """Make the queue of a process's threads, which a fork of it does not have."""
    queue = SimpleQueue[Callable[[], object]]()
    for _ in range(_READERS):
        threading.Thread(target=_work, args=(queue,), name=_AHEAD, daemon=True).start()
    return queue


def _work(queue: SimpleQueue[Callable[[], object]]) -> None:
    while True:
        # Who needs the bytes asks again, and says what is wrong
        with suppress(Exception):
            queue.get()()


def _call(
    place: str, method: str, check: Callable[[Any], None] = lambda result: None, **settings: Any
) -> Any:
    """Call a method of the store on a place, and again after a failure, or if the check raises."""
    try:
        store, path = fsspec.url_to_fs(place, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        extra = _EXTRAS.get(place.partition(":")[0])
        hint = f"pip install '.[{extra}]' in samewise's folder" if extra else ""
        raise ConfigError(Problem(place, first_line(error), hint=hint)) from None
    limit, reason, is_content = {"timeout": LIMIT_S} if store.async_impl else {}, "", False
    # The others wait for the block's lock meanwhile, and who needs the bytes asks again
    most = 1 if threading.current_thread().name == _AHEAD else TRIES
    for tries in range(1, most + 1):
        try:
            result = getattr(store, method)(path, **settings, **limit)
            check(result)
            return result
        except FileNotFoundError:
            raise FileNotFoundError(
                errno.ENOENT, "there is no such bucket, folder or file", place
            ) from None
        # Stores raise errors of many packages
        except Exception as error:
            if isinstance(error, PermissionError) or type(error).__name__ in _LASTING:
                raise PermissionError(errno.EACCES, first_line(error), place) from None
            is_content = isinstance(error, ValueError)
            reason = (
                f"gives no answer in {LIMIT_S:.0f} s"
                if isinstance(error, TimeoutError)
                else first_line(error)
            )
        if tries < most:
            # Not at the same time as other machines; training's own generators stay as they are
            time.sleep(2 ** (tries - 2) * Random().uniform(0.5, 1))
    raise (DataError if is_content else TrainingError)(
        Problem(
            place,
            f"cannot be read, after {TRIES} tries: {reason}",
            hint=""
            if is_content
            else "when the store answers, run the same command again to resume",
        )
    )


def _request(path: str, start: int, stop: int, expected: str = "") -> bytes:
    """Read a range of bytes of a file from the store, until it is whole and has the hash."""

    def check(content: bytes) -> None:
        if len(content) != stop - start:
            raise ValueError(f"the store gives {len(content):,} of {stop - start:,} bytes")
        if expected and xxhash.xxh3_128_hexdigest(content) != expected:
            raise ValueError(f"bytes {start:,} to {stop:,} are others than when it was indexed")

    return _call(path, "cat_file", check, start=start, end=stop)


def _read_block(path: str, number: int, start: int, stop: int) -> bytes:
    """Return the bytes from start to stop of a block, from the disk if it is there."""
    size, hashes = _FILES[path]
    name, begin = hashes[number], number * cache.BLOCK
    if (content := cache.kept(name, start, stop)) is None:
        with cache.lock(name):
            # Another process may have fetched it meanwhile
            if (content := cache.kept(name, start, stop)) is None:
                whole = _request(path, begin, min(begin + cache.BLOCK, size), name)
                cache.keep(name, whole)
                content = whole[start:stop]
    return content
