"""Blocks of files in object stores, on the local disk, shared by the processes of a machine.

A block's file is named by the hash of its content, so that it is never out of date. It is written
under another name and renamed, so that a process may end at any time.
"""

import os
from pathlib import Path

import xxhash
from filelock import FileLock

from samewise.runner.errors import limit_from

BLOCK = 1 << 22
"""Most bytes of a block. The index of shards in a store has the hashes of such blocks."""
_CHECKED = set[str]()
"""Blocks that this process has compared with their hashes."""


def folder() -> Path:
    """Return the folder of what is kept of shards and cannot be kept beside them."""
    return Path(
        os.environ.get("SAMEWISE_SHARD_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "samewise", "shards")
    )


def limit() -> int:
    """Return the most bytes of blocks to keep.

    Raises:
        ConfigError: The environment variable is not a valid limit.
    """
    return limit_from("SAMEWISE_SHARD_CACHE_GB", 32) * 10**9


def lock(name: str) -> FileLock:
    """Return a lock that the processes of this machine hold to fetch a block; few share one."""
    place = folder() / "locks"
    place.mkdir(parents=True, exist_ok=True)
    return FileLock(place / name[:3])


def kept(name: str, start: int, stop: int) -> bytes | None:
    """Return the bytes from start to stop of a block on the disk; None if it is not there."""
    try:
        with open(folder() / "blocks" / name, "rb") as file:
            # After a power failure it may have other bytes
            if name not in _CHECKED:
                if xxhash.xxh3_128_hexdigest(file.read()) != name:
                    return None
                _CHECKED.add(name)
            os.utime(file.fileno())
            return os.pread(file.fileno(), min(stop, BLOCK) - start, start)
    except FileNotFoundError:
        return None


def keep(name: str, content: bytes) -> None:
    """Write a block to the disk, in place of those whose last use is the longest ago."""
    blocks, draft = folder() / "blocks", folder() / "draft"
    blocks.mkdir(parents=True, exist_ok=True)
    with lock("all"):
        names, most = (
            os.listdir(blocks),
            max(limit() // BLOCK, 1),
        )
        if len(names) >= most:
            names.sort(key=lambda name: os.stat(blocks / name).st_mtime_ns)
            for oldest in names[: len(names) - most + 1 + most // 16]:
                os.unlink(blocks / oldest)
        draft.write_bytes(content)
        os.replace(draft, blocks / name)
    _CHECKED.add(name)
