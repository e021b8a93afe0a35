"""Name and tag a run after its training: `notes.json` in its folder. Imports neither torch nor mlflow."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import complete_matches
from samewise.runner.records.locks import hold

_NAME = r"\w[\w.+ -]{0,199}"


def rename(folder: RunFolder, name: str) -> None:
    """Give a run a name; with an empty one it has its own again.

    Raises:
        ConfigError: The name cannot be one, or names another run of the folder.
    """
    run = folder.path.resolve()
    ConfigError.raise_if(
        name and not re.fullmatch(_NAME, name),
        "NAME",
        "cannot be a run's name",
        name,
        "letters, digits, spaces and _ . + -, beginning with a letter or digit",
    )
    namesakes = [
        str(other.path)
        for other in complete_matches(name, run_root=run.parents[1])
        if name and other.path.resolve() != run
    ]
    if namesakes:
        raise ConfigError(
            Problem(
                "NAME",
                "names another run",
                name,
                hint=f"choose another, or rename {namesakes[0]} first",
            )
        )
    with _changing(folder) as notes:
        notes["name"] = name


def tag(folder: RunFolder, changes: Sequence[str]) -> None:
    """Add, replace and remove tags of a run.

    Args:
        folder: The run's folder.
        changes: `KEY=VALUE`, or `~KEY` to remove a tag.

    Raises:
        ConfigError: A change is neither.
    """
    matches = {x: re.fullmatch(r"~([\w./-]+)|([\w./-]+)=(.*)", x) for x in changes}
    ConfigError.raise_all(
        Problem("TAG", "is not a tag", x, "KEY=VALUE, or ~KEY to remove it")
        for x, match in matches.items()
        if match is None
    )
    # A removed one is null, so that it is also removed from MLflow, or hides one of the config
    tags = {match[1] or match[2]: match[3] for match in matches.values() if match}
    with _changing(folder) as notes:
        notes["tags"] = {**notes.get("tags", {}), **tags}


@contextmanager
def _changing(folder: RunFolder) -> Generator[dict[str, Any]]:
    """Yield a run's notes, and write them afterwards; another process that changes them waits."""
    with hold(folder.path / ".notes.lock", wait=True, sign=False):
        notes: dict[str, Any] = dict(read_json(folder.notes, shapes.NOTES) or {})
        yield notes
        write_json(folder.notes, notes)
