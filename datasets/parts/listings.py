"""Remembers what folders with many files hold: the next start checks their times only."""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

_LEAST_FILES = 10_000
"""Number of files from which listings are kept: fewer are listed as fast as read."""
_SETTLED_NS = 60_000_000_000
"""Age of a folder's last change from which its times are trusted: they have a granularity of up to
two seconds, and a server has a clock of its own."""
_MOUNTS = Path("/proc/self/mountinfo")
_RUBBISH = {
    *("__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information"),
    *("lost+found", "thumbs.db", "desktop.ini", "ehthumbs.db"),
}
"""Entries that operating systems and disk stations leave in folders, besides hidden ones."""
Content = tuple[str, str, Mapping[str, int]]
"""A folder's files with one of the endings and its folders, names joined by "/", which no name has;
and the numbers of its other files, by ending."""


def is_rubbish(name: str) -> bool:
    """Whether an entry is neither sample nor class: hidden, or left by an operating system."""
    return name.startswith(".") or name.lower() in _RUBBISH


@contextlib.contextmanager
def listings(
    folder: str | os.PathLike[str], endings: Sequence[str]
) -> Generator[Callable[[str, os.stat_result], Content]]:
    """Yield a function that returns the content of a folder below one, from its path and status.

    What it returned is kept afterwards, in `~/.cache/samewise/listings` or below `XDG_CACHE_HOME`,
    by the folders' inodes and times.
    """
    name = blake2b(repr((os.path.realpath(folder), endings)).encode(errors="surrogateescape"))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    file = Path(cache, "samewise", "listings", name.hexdigest()[:32])
    earlier, current, devices = _read(file), dict[str, Content](), set[int]()

    def content(path: str, status: os.stat_result) -> Content:
        key = f"{status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"
        settled = time.time_ns() - _SETTLED_NS
        content, has_links = (earlier[key], False) if key in earlier else _scan(path, endings)
        # What a link leads to changes without the folder
        if not has_links and max(status.st_mtime_ns, status.st_ctime_ns) <= settled:
            current[key] = content
            devices.add(status.st_dev)
        return content

    yield content
    is_large = sum(names.count("/") + 1 for names, _, _ in current.values()) >= _LEAST_FILES
    # Without a home folder, or space on its disk, folders are listed at every start
    with contextlib.suppress(OSError):
        if is_large and current.keys() != earlier.keys() and not devices & _devices_without_times():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            text, temporary = json.dumps(current).encode(), file.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(blake2b(text).hexdigest().encode() + b"\n" + text)
            os.replace(temporary, file)


def _scan(path: str, endings: Sequence[str]) -> tuple[Content, bool]:
    """List a folder; return its content, and whether a link's target decided it."""
    names, folders, other_counts, has_links = list[str](), list[str](), Counter[str](), False
    ends = tuple(endings)
    with os.scandir(path) as entries:
        for entry in entries:
            if is_rubbish(entry.name):
                continue
            # An entry's own type costs no disk access; following links would, for each
            if entry.name.lower().endswith(ends) and not entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
                continue
            has_links |= entry.is_symlink()
            if entry.is_dir():
                folders.append(entry.name)
            else:
                other_counts[os.path.splitext(entry.name)[1].lower()] += 1
    return ("/".join(sorted(names)), "/".join(folders), other_counts), has_links


def _devices_without_times() -> set[int]:
    """Return the file systems in user space: many of object stores do not date folders' changes."""
    mounts = [line.split(" ") for line in _MOUNTS.read_text(errors="replace").splitlines()]
    return {
        os.makedev(*map(int, fields[2].split(":")))
        for fields in mounts
        if fields[fields.index("-") + 1].startswith("fuse")
    }


def _read(file: Path) -> dict[str, Content]:
    """Read listings; none if the file is missing, damaged or another user's."""
    with contextlib.suppress(OSError), open(file, "rb") as handle:
        digest, text = handle.readline().strip(), handle.read()
        if digest == blake2b(text).hexdigest().encode() and (
            os.fstat(handle.fileno()).st_uid == os.geteuid()
        ):
            return json.loads(text)
    return {}
