"""File locks, by filelock.

A lock ends with the process that holds it, however that ends, and forked children do not inherit
it. Imports neither torch nor mlflow.
"""

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

    Args:
        path: The file, created if missing.
        wait: Whether to wait for another process that holds it.
        sign: Whether to write into the file which process holds it.

    Yields:
        A function that returns whether the file is gone, even if there is another with its name.

    Raises:
        LockHeld: Another process holds it, and `wait` is false.
        DamagedFile: A folder, a pipe or a link is in its place.
        OSError: The file system has no `flock`.
    """
    from filelock import FileLock, Timeout

    require_no_link(path)
    if (handle := open_to_read(path)) is not None:
        handle.close()
    # On a file system without `flock`, filelock's substitute is a file that outlives a killed
    # process: an OSError is better
    lock = FileLock(path, fallback_to_soft=False, on_acquired=_sign if sign else None)
    try:
        lock.acquire(blocking=wait)
    except Timeout:
        raise LockHeld(holder(path) or "another process") from None
    try:
        status = os.stat(path)

        def is_gone() -> bool:
            try:
                return not os.path.samestat(status, os.stat(path))
            except OSError as error:
                # Any other error does not mean that the file is gone
                return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

        yield is_gone
    finally:
        lock.release()


def holder(path: Path) -> str | None:
    """Return the process that holds a lock, according to its file, or None."""
    handle = open_to_read(path)
    if handle is None:
        return None
    with handle:
        # A shared lock, since filelock's are exclusive: two processes that look at once would each
        # take the other for the holder
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            return handle.read(1000).decode(errors="replace").strip() or "another process"
        return None


def process_of(signature: str | None) -> tuple[int, str] | None:
    """Return the id and the machine of the process that `holder` names, or None."""
    parts = (signature or "").split()
    return (int(parts[1]), parts[3]) if len(parts) == 4 and parts[1].isdecimal() else None


def _sign(file: int) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
