"""File locks, by filelock: a lock ends with the process that holds it, however that ends, and
forked children do not inherit it.

A file system without `flock` raises OSError: filelock's substitute there is a file that would
outlive a killed process. Imports neither torch nor mlflow.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path

from samewise.runner.records.files import open_to_read, require_no_link


class LockHeld(Exception):
    """Another process holds the lock; the message identifies it."""


@contextlib.contextmanager
def hold(path: Path, *, wait: bool = False, sign: bool = True) -> Generator[Callable[[], bool]]:
    """Hold a lock.

    Yield a function that returns whether the file is gone, even if there is another with its name.

    LockHeld if another process holds it and `wait` is false; DamagedFile if a folder, a pipe or a
    link is in its place.

    Args:
        path: The file, created if missing.
        wait: For another process that holds it.
        sign: Write into the file who holds it.
    """
    from filelock import FileLock, Timeout

    require_no_link(path)
    if (there := open_to_read(path)) is not None:
        there.close()
    lock = FileLock(path, fallback_to_soft=False, on_acquired=_sign if sign else None)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise LockHeld(holder(path) or "another process") from None
    try:
        mine = os.stat(path)

        def is_gone() -> bool:
            try:
                return not os.path.samestat(mine, os.stat(path))
            except OSError as error:  # other errors do not mean that it is gone
                return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

        yield is_gone
    finally:
        lock.release()


def holder(path: Path) -> str | None:
    """The process that holds a lock, according to its file; None if there is none.

    With a shared lock of our own: filelock's are exclusive, and two processes that look at once
    would each take the other for the holder.
    """
    handle = open_to_read(path)
    if handle is None:
        return None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            return handle.read(1000).decode(errors="replace").strip() or "another process"
        return None


def process_of(said: str | None) -> tuple[int, str] | None:
    """The process that `holder` names, and its machine; None if there is none."""
    words = (said or "").split()
    return (int(words[1]), words[3]) if len(words) == 4 and words[1].isdecimal() else None


def _sign(file: int) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
