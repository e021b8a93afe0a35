"""What has been found sound before, so that a slip of the pen is told, and a sweep handed to a cluster, without the seconds of importing torch.

Whether a component is sound is a matter of its config and of the signatures that its targets have. So the verdict is kept, in the user's cache, under a digest
of both: of signatures by the state of the files that hold them. Only "nothing is wrong" is kept. Each job checks its config again before it trains.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from samewise.runner.config.project import Project

_DAYS = 60
"""How long a verdict is kept that nobody asks for."""

Find = Callable[[Mapping[str, Any]], list[Any]]


def remembered(find: Find, project: Project) -> Find:
    """`find`, which says what is wrong with some keys of a config, asked only where it has not said before that nothing is."""

    def known(part: Mapping[str, Any]) -> list[Any]:
        place = _home() / _digest(part, project)
        try:
            os.utime(place)
        except OSError:
            found = find(part)
            if not found:
                _keep(place)
            return found
        return []

    return known


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samewise" / "sound"


def _keep(place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        for old in place.parent.iterdir():
            if old.stat().st_mtime < time.time() - _DAYS * 86400:
                old.unlink(missing_ok=True)
    except OSError:  # a home that cannot be written: then it is found out anew each time
        return


def _digest(part: Mapping[str, Any], project: Project) -> str:
    packages = sorted({"samewise", *(target.partition(".")[0] for target in _targets(part))})
    facts = [sys.version, project.packages, _shape(part), [(name, _state(name)) for name in packages]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in cast(Mapping[str, Any], node).items():
            yield from [str(value)] if key == "_target_" else _targets(value)
    elif isinstance(node, list):
        for value in cast(list[Any], node):
            yield from _targets(value)


def _shape(node: Any) -> Any:
    """The config with every fraction alike: no rule tells one from another, and they are what sweeps vary most."""
    if isinstance(node, Mapping):
        return {key: _shape(value) for key, value in cast(Mapping[str, Any], node).items()}
    if isinstance(node, list):
        return [_shape(value) for value in cast(list[Any], node)]
    return "float" if isinstance(node, float) else [node]


@functools.cache
def _state(package: str) -> str:
    """The state of a package's files: of all for samewise and for what can be edited, of the first for what is installed, which changes with every version."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ""
    places = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    first = Path(found.origin) if found and found.origin else None
    installed = first is not None and any(part in ("site-packages", "dist-packages") for part in first.parts) and package != "samewise"
    files = [first] if installed and first else [file for place in places for file in _python_files(place)]
    total = hashlib.sha256()
    for file in files:
        facts = file.stat()
        total.update(f"{file} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return total.hexdigest()


def _python_files(folder: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        yield from (Path(at, name) for name in sorted(names) if name.endswith(".py"))
