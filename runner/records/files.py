"""Files that are written whole or not at all, and what is in the way renamed. Imports neither torch nor mlflow."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any, cast

from samewise.runner.errors import Problem, TrainingError


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old content or the new, never a part.

    Raises:
        TrainingError: the disk is full or the file cannot be written; the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    raw = data.encode() if isinstance(data, str) else data
    try:
        with open(temporary, "wb") as handle:
            handle.write(raw)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TrainingError(Problem(str(path), f"cannot be written: {error.strerror}", hint="free some space, then run the same command again")) from None


def fsync_folder(path: Path) -> None:
    """Make renames within a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file or folder that may hold work and is in the way to WHY-NAME, or WHY-NAME-2 and so on; where it is now."""
    names = (f"{why}-{path.name}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    target = next(place for place in map(path.with_name, names) if not os.path.lexists(place))
    path.rename(target)
    return target


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def read_mapping(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where it is missing, cannot be read, or is something else. For what is only shown: nothing is decided by it."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def read_json(path: Path) -> Any:
    """The file's value, or None where the file does not exist."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
