"""SQLite stores that were moved. MLflow keeps the places of artifacts as absolute paths in its database. Does not use mlflow."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Generator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from samewise.runner.tracking.address import sqlite_file
from samewise.runner.tracking.store_places import LONGEST_S, OTHERS, RUNS, limit_queries

ARTIFACTS = "mlartifacts"
INTENT = "samewise.intent"
"""The tag by which an MLflow run is known again; see `TrackingState.intent`."""


def was_moved(before: str, now: str, run_id: str | None, intent: str | None) -> bool:
    """Whether an MLflow run is in one SQLite store now, and no longer in the one where it was, if there is still one."""
    old, new = sqlite_file(before), sqlite_file(now)
    return old is not None and new is not None and _holds(new, run_id, intent) and not _holds(old, run_id, intent)


def _holds(file: Path, run_id: str | None, intent: str | None) -> bool:
    if not file.is_file() or not intent:
        return False
    with contextlib.suppress(sqlite3.Error), _open(file, mode="ro") as store:
        return bool(store.execute("SELECT 1 FROM tags WHERE run_uuid = ? AND key = ? AND value = ?", (run_id, INTENT, intent)).fetchall())
    return False


def correct_places(file: Path) -> None:
    """Correct the places of artifacts in a store that was moved with its `mlartifacts`, or copied. A store that was moved without these is left alone.

    A copy, whose original still exists, keeps beside it what it adds, and what was copied. What only the original has stays there.
    """
    here = file.absolute().parent / ARTIFACTS
    with contextlib.suppress(sqlite3.Error), _open(file, mode="rw") as store:
        for before in _roots(store) - {str(here)}:
            runs = store.execute("SELECT run_uuid FROM runs WHERE artifact_uri = ? || '/' || run_uuid || '/artifacts'", (before,)).fetchall()
            is_there, is_here = (any((root / str(run)).is_dir() for (run,) in runs) for root in (Path(before), here))
            was_moved_with_them = here.is_dir() and not is_there and (is_here or not os.path.exists(before))  # a folder of someone else's may be there now
            if was_moved_with_them or _is_another(Path(before).parent / file.name, file):
                _correct(store, before, str(here))


def _is_another(store: Path, this: Path) -> bool:
    """Whether there is a store that is not this one by another path."""
    with contextlib.suppress(OSError):
        return store.is_file() and not store.samefile(this)
    return False


def _correct(store: sqlite3.Connection, before: str, here: str) -> None:
    """Change the places below `before` to those below `here`, except where there are files before and none here."""

    def is_only_there(place: str) -> bool:
        return os.path.exists(place) and not os.path.exists(here + place[len(before) :])

    store.create_function("is_only_there", 1, is_only_there)
    store.execute("BEGIN IMMEDIATE")
    for table, column, _ in (*RUNS, *OTHERS):
        if store.execute("SELECT 1 FROM pragma_table_info(?) WHERE name = ?", (table, column)).fetchall():  # other versions of MLflow may lack it
            which = f"({column} = ? OR substr({column}, 1, ?) = ? || '/')" + ("" if table == "experiments" else f" AND NOT is_only_there({column})")
            words = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {which}"
            store.execute(words, (here, len(before) + 1, before, len(before) + 1, before))
    store.execute("COMMIT")


def lost_place(place: str, file: Path | None, *, chosen: str | None, is_used: bool) -> Path | None:
    """The folder of an experiment's artifacts if it no longer exists, so that MLflow would create another in its place.

    Args:
        place: Where the experiment's artifacts are, as in the store.
        file: The store's, if it is an SQLite file: the folder beside it may be created.
        chosen: `tracking.artifact_location`, which may be created unless `is_used`.
        is_used: Whether the run has sent files there.
    """
    root = _local(place)
    if root is None or os.path.exists(root) or (file is not None and root == file.absolute().parent / ARTIFACTS):
        return None
    return None if not is_used and (file is None or (chosen is not None and root == _local(chosen))) else root


def lost_place_of(file: Path, experiment: str, *, chosen: str | None, is_used: bool) -> Path | None:
    """`lost_place` of an experiment in an SQLite store, which may not exist yet."""
    if not file.is_file():
        return None
    with contextlib.suppress(sqlite3.Error), _open(file, mode="ro") as store:
        found = store.execute("SELECT artifact_location FROM experiments WHERE name = ?", (experiment,)).fetchall()
        return lost_place(str(found[0][0]), file, chosen=chosen, is_used=is_used) if found else None
    return None


def is_gone(place: str) -> bool:
    """Whether a place is on this machine, and does not exist."""
    local = _local(place)
    return local is not None and not os.path.exists(local)


def describe_lost(place: Path, file: Path | None) -> str:
    """Say that files are not sent to a place, and what to do."""
    moved = f"; for a store that was moved, move or create {file.absolute().parent / ARTIFACTS}" if file is not None else ""
    return f"MLflow's folder of artifacts {place} no longer exists and is not created again: files stay in the run's folder. Restore it{moved}, then sync again"


@contextlib.contextmanager
def _open(file: Path, *, mode: str) -> Generator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode={mode}", uri=True, timeout=30, isolation_level=None)) as store:
        limit_queries(store, until=time.monotonic() + LONGEST_S)
        yield store


def _roots(store: sqlite3.Connection) -> set[str]:
    """The folders `mlartifacts` in which experiments or runs keep artifacts, as absolute paths; MLflow's own experiment has a folder inside."""
    of_runs = "SELECT substr(artifact_uri, 1, length(artifact_uri) - length(run_uuid) - 11) FROM runs WHERE artifact_uri LIKE '%/' || run_uuid || '/artifacts'"
    places = [Path(str(place)) for (place,) in store.execute(f"SELECT artifact_location FROM experiments UNION {of_runs}").fetchall()]
    return {str(root) for place in places for root in (place, place.parent) if root.name == ARTIFACTS and root.is_absolute()}


def _local(place: str) -> Path | None:
    """A place as a path on this machine; None if it is elsewhere."""
    parts = urlsplit(place)
    return None if parts.scheme not in ("", "file") else Path(unquote(parts.path) if parts.scheme else place).absolute()
