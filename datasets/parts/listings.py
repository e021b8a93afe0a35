"""Remembers what folders with many files hold: the next start checks their times only."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

_LEAST_FILES = 10_000
"""Number of files from which listings are kept: fewer are listed as fast as read."""
_SETTLED_NS = 60_000_000_000
"""Age of a folder's last change from which its times are trusted: they have a granularity of up to
two seconds, and a server has a clock of its own."""
_MOUNTS = Path("/proc/self/mountinfo")


class Content(NamedTuple):
    """The entries of one folder.

    Args:
        names: Names of the files with one of the endings.
        folders: Names of the folders.
        other_counts: Numbers of other files, by ending.
        links: Names of the links among the folders and the other files.
    """

    names: list[str]
    folders: list[str]
    other_counts: Counter[str]
    links: list[str]


class Listings:
    """The contents of folders, by their inodes and times.

    Args:
        earlier: What is remembered.
    """

    def __init__(self, earlier: dict[str, Any]) -> None:
        self.earlier = earlier
        self.current = dict[str, Any]()
        self.devices = set[int]()

    def content(self, path: str, status: os.stat_result, scan: Callable[[str], Content]) -> Content:
        """Return a folder's content.

        Args:
            path: The folder.
            status: Its status.
            scan: Lists it, if it has changed.
        """
        key = f"{status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"
        if (packed := self.earlier.get(key)) is not None:
            names, folders, other_counts = packed
            content = Content(_split(names), _split(folders), Counter(other_counts), [])
        else:
            settled = time.time_ns() - _SETTLED_NS
            content = scan(path)
            # What a link leads to changes without the folder
            if content.links or max(status.st_mtime_ns, status.st_ctime_ns) > settled:
                return content
            names, folders = "/".join(sorted(content.names)), "/".join(content.folders)
            packed = [names, folders, content.other_counts]
        self.current[key] = packed
        self.devices.add(status.st_dev)
        return content


@contextlib.contextmanager
def remembered(folder: str | os.PathLike[str], endings: Sequence[str]) -> Generator[Listings]:
    """Yield the listings of the folders below one, and remember them afterwards.

    They are in `~/.cache/samewise/listings`, or below `XDG_CACHE_HOME`.
    """
    key = blake2b(repr((os.path.realpath(folder), endings)).encode(errors="surrogateescape"))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    file = Path(cache, "samewise", "listings", key.hexdigest()[:32])
    listings = Listings(_read(file))
    yield listings
    count = sum(names.count("/") + 1 for names, _, _ in listings.current.values())
    if count >= _LEAST_FILES and listings.current.keys() != listings.earlier.keys():
        # Without a home folder, or a disk with space, folders are listed at every start
        with contextlib.suppress(OSError):
            if not listings.devices & _devices_without_times():
                _write(file, listings.current)


def _split(names: str) -> list[str]:
    return names.split("/") if names else []


def _devices_without_times() -> set[int]:
    """Return the file systems in user space: many of object stores do not date folders' changes."""
    mounts = [line.split(" ") for line in _MOUNTS.read_text(errors="replace").splitlines()]
    return {
        os.makedev(*map(int, fields[2].split(":")))
        for fields in mounts
        if fields[fields.index("-") + 1].startswith("fuse")
    }


def _read(file: Path) -> dict[str, Any]:
    """Read listings; none if the file is missing, damaged or another user's."""
    try:
        with open(file, "rb") as handle:
            digest, text = handle.readline().strip(), handle.read()
            is_own = os.fstat(handle.fileno()).st_uid == os.geteuid()
    except OSError:
        return {}
    is_whole = digest == blake2b(text).hexdigest().encode()
    return json.loads(text) if is_own and is_whole else {}


def _write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps(content).encode()
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_bytes(blake2b(text).hexdigest().encode() + b"\n" + text)
    os.replace(temporary, file)
