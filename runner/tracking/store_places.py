"""Finds what an SQLite store would make MLflow's server access outside the store's folder, since a stranger may have made the store. Does not use mlflow."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from samewise.runner.errors import ConfigError, Problem, TrainingError, first_few, first_line
from samewise.runner.records import trust as signatures
from samewise.runner.records.files import LARGEST, read_text, write_atomically
from samewise.runner.tracking.address import remove_password, sqlite_file

LONGEST_S = 300.0
"""How long a store is waited for."""
HEAP = 512 << 20
RUNS = (("runs", "artifact_uri", ""), ("logged_models", "artifact_location", ""))
"""Where a run's and a logged model's files are: table, column, condition. They lie in their experiment's place as a rule."""
OTHERS = (
    ("experiments", "artifact_location", ""),
    ("model_versions", "source", ""),
    ("model_versions", "storage_location", ""),
    ("trace_tags", "value", "WHERE key IN ('mlflow.artifactLocation', 'mlflow.trace.archiveLocation')"),
    ("webhooks", "url", ""),
)
_REFERS = ("mlflow-artifacts", "models", "runs")
"""Schemes of what is in the folder that the server keeps, or is asked for at another of these places."""
_OF_MLFLOW = (
    "CREATE TRIGGER prevent_secrets_aad_mutation BEFORE UPDATE ON secrets FOR EACH ROW "
    "WHEN OLD.secret_id != NEW.secret_id OR OLD.secret_name != NEW.secret_name "
    "BEGIN SELECT RAISE(ABORT, 'secret_id and secret_name are immutable (used as AAD in encryption)'); END",
)
"""The triggers that MLflow 3.17 makes, on one line each."""


def limit_queries(store: sqlite3.Connection, *, until: float, largest: int = LARGEST, over: Callable[[], object] = lambda: None) -> None:
    """Limit the queries of a database that a stranger may have made: a view can be endless, and fill memory and disk.

    Its queries end `until` then, by the monotonic clock, after `over` is called. No value has more than `largest` bytes; SQLite in this process takes
    `HEAP` bytes and no disk.
    """
    store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, largest)
    store.execute("PRAGMA temp_store=MEMORY").close()
    store.execute(f"PRAGMA hard_heap_limit={HEAP}").close()
    store.set_progress_handler(lambda: int(time.monotonic() > until and (over(), True)[1]), 100_000)


def unlimit_queries(store: sqlite3.Connection) -> None:
    """Remove these limits from a connection that others will use."""
    store.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2**31 - 1)
    store.set_progress_handler(None, 0)


def require(uri: str, *, trust: bool) -> None:
    """Raise a ConfigError if a store makes MLflow show or call things outside its folder and is not trusted, or cannot be read.

    The store changes with every run, so what is signed, and asked for once, is a list of these places beside it. A trigger or a view can change what the store
    says once it has been looked at, so those that MLflow does not make are on the list too.

    Args:
        uri: As `check_uri` gives it; any but that of an SQLite file passes.
        trust: Whether the user has said `--trust`.
    """
    file = sqlite_file(uri)
    if file is None:
        return
    try:
        outside = _outside(file)
    except (sqlite3.Error, MemoryError) as error:
        said = first_line(error) or "it takes too much memory"
        hint = "wait until no other process holds it, or restore it"
        raise ConfigError(Problem(str(file), f"cannot be read: {said}", expected="an MLflow store", hint=hint)) from None
    listed = file.absolute().with_name(f".{file.name}.places")
    text = "".join(f"{one}\n" for one in outside)
    if not outside or (signatures.is_signed(listed) and read_text(listed) == text):
        return
    if trust:
        with contextlib.suppress(TrainingError):  # the folder cannot be written: trusted this time only
            write_atomically(listed, text)
            signatures.sign(listed)
        return
    words = f"the store names places outside its folder, which MLflow would use, or show to anyone on this machine who opens the page: {first_few(outside, 3)}"
    raise ConfigError(Problem(str(file), words, hint="if these places are yours, or you trust whoever made the store, add --trust; it is remembered for them"))


def _outside(file: Path) -> list[str]:
    """Places outside the store's folder, and triggers that could change them, in order."""
    home = file.absolute().parent.resolve()
    with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as store:
        limit_queries(store, until=time.monotonic() + LONGEST_S)
        store.text_factory = partial(str, encoding="utf-8", errors="backslashreplace")  # a value that is not text would stop the reading
        runs = {place for one in RUNS for place in _places(store, one, home)}
        others = {place for one in OTHERS for place in _places(store, one, home)}
        made = store.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchall()
    below = {place for place in runs if ".." not in place and any(place.startswith(f"{root}/") for root in others)}
    foreign = {str(name) for name, sql in made if " ".join(str(sql).split()) not in _OF_MLFLOW}
    return sorted(remove_password(one).replace("\n", "\\n") for one in (others | runs) - below | foreign)


def _places(store: sqlite3.Connection, where: tuple[str, str, str], home: Path) -> set[str]:
    table, column, condition = where
    if (column,) not in store.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall():  # a store of another MLflow version, or an empty one
        return set()
    found = store.execute(f"SELECT DISTINCT {column} FROM {table} {condition}")
    return {place for (named,) in found if named and (place := _if_outside(str(named), home))}


def _if_outside(named: str, home: Path) -> str:
    """The place if it is neither in the folder `home` nor where this command's server keeps files; otherwise ""."""
    try:
        parts = urlsplit(named)
    except ValueError:
        return named
    if parts.scheme not in ("", "file"):
        return "" if parts.scheme in _REFERS else named
    local = Path(unquote(parts.path)).resolve()
    return "" if local.is_relative_to(home) else str(local)
