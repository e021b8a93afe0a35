"""The index of a run root: what was read from the files of its runs, in one SQLite file.

The folders are the truth: an entry counts only while its files are as they were when it was read.
The index holds nobody's work. It may be deleted at any time, and a damaged one is replaced.
Imports neither torch nor mlflow.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import samewise
from samewise.runner.records.files import has_warned
from samewise.runner.records.folder import RunFolder

FILE = ".index.sqlite"
_BATCH = 1000
_WAIT_S = 0.1
_SETTLED_NS = 2_000_000_000
"""Within a tick of the file system's clock, two changes have one time: what is younger is not
stored."""


def entries(
    run_root: Path,
    kind: str,
    files: Sequence[str],
    folders: Iterable[str],
    read: Callable[[RunFolder], str],
) -> Iterator[tuple[str, str]]:
    """Yield runs' folders, in any order, each with what `read` returns for it.

    Args:
        run_root: The run root, whose index is used and brought up to date.
        kind: Name of what is read.
        files: Names of all files that `read` opens. A folder without the first is left out.
        folders: Folders of runs, or of anything else.
        read: Reads a run. If it warns, the entry is not stored, so that it warns each time.
    """
    index, under = run_root / FILE, "" if run_root == Path() else f"{run_root}/"
    pending, leftovers, rows = (
        dict.fromkeys(folders),
        list[tuple[str, str]](),
        list[tuple[str, ...]](),
    )
    for run, stamp, digest, content in _select(index, kind):
        if (folder := under + run) not in pending:
            leftovers += [] if os.path.exists(folder) else [(kind, run)]
        elif stamp == _stamp(folder, files)[0] and digest == _digest(run, stamp, content):
            del pending[folder]
            yield folder, content
    try:
        for folder in pending:
            now, (stamp, changed_ns) = time.time_ns(), _stamp(folder, files)
            if stamp:
                content, run = read(RunFolder(Path(folder))), folder.removeprefix(under)
                is_settled = changed_ns < now - _SETTLED_NS and not has_warned(folder)
                if is_settled and under + run == folder and run.isprintable():
                    rows.append((kind, run, stamp, _digest(run, stamp, content), content))
                yield folder, content
            if len(rows) == _BATCH:
                _store(index, rows)
                rows.clear()
    finally:
        # Also what was read until an interruption
        _store(index, rows, leftovers)


def _store(
    index: Path, rows: Sequence[tuple[str, ...]], leftovers: Sequence[tuple[str, str]] = ()
) -> None:
    if not rows and not leftovers:
        return
    with _replacing_damaged(index), contextlib.closing(_connect(index)) as connection:
        # Without waiting for the disk: the digests show what a crash has left
        connection.executescript(
            "PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF;"
            "CREATE TABLE IF NOT EXISTS entries (kind TEXT, run TEXT, stamp TEXT, digest TEXT,"
            " content TEXT, PRIMARY KEY (kind, run)) WITHOUT ROWID"
        )
        connection.executemany("DELETE FROM entries WHERE kind = ? AND run = ?", leftovers)
        connection.executemany("REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", rows)
        connection.commit()


def _select(index: Path, kind: str) -> Iterator[tuple[str, str, str, str]]:
    if os.path.exists(index):
        with _replacing_damaged(index), contextlib.closing(_connect(index)) as connection:
            yield from connection.execute(
                "SELECT run, stamp, digest, content FROM entries WHERE kind = ?", (kind,)
            )


def _connect(index: Path) -> sqlite3.Connection:
    # A link may lead to any file of the user's
    if os.path.lexists(index) and not stat.S_ISREG(os.lstat(index).st_mode):
        raise sqlite3.OperationalError
    connection = sqlite3.connect(index, timeout=_WAIT_S)
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    return connection


@contextlib.contextmanager
def _replacing_damaged(index: Path) -> Generator[None]:
    """Go on without an index that is locked or cannot be read or written; remove a damaged one."""
    try:
        yield
    except sqlite3.Error as error:
        damage = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in damage:
            with contextlib.suppress(OSError):
                index.unlink()


def _stamp(folder: str, files: Sequence[str]) -> tuple[str, int]:
    """Return what tells a state of some files from any other, and the time of its last change.

    ("", 0) without the first file.
    """
    states, changed_ns = [samewise.__version__], 0
    for name in files:
        try:
            state = os.stat(f"{folder}/{name}")
        except OSError as error:
            if name == files[0]:
                return "", 0
            states.append(f"-{error.errno}")
        else:
            # Unlike the time of writing, `touch` and `cp -a` cannot set that of the last change
            states.append(f"{state.st_ctime_ns},{state.st_size},{state.st_ino}")
            changed_ns = max(changed_ns, state.st_ctime_ns)
    return " ".join(states), changed_ns


def _digest(*parts: str) -> str:
    return f"{zlib.crc32(' '.join(parts).encode(errors='replace')):08x}"
