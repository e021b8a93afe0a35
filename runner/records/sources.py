"""The user's own code that a run was trained with: which files, and which of them are other now. Imports neither torch nor mlflow.

A file is named by its top-level package and its place in that (`lab/models/net.py`), so it is the same file in another folder, on another machine, in a copy.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder


def is_library(file: Path) -> bool:
    """Whether a file is Python's own, or installed: what is edited lies elsewhere."""
    return any(part in ("site-packages", "dist-packages") for part in file.parts) or file.is_relative_to(sys.base_prefix)


def record(packages: Sequence[str]) -> dict[str, str]:
    """The SHA-256, by name, of each file of these packages that has been imported, and of each that those import in turn, libraries and samewise left out."""
    declared = tuple(f"{package}." for package in packages)
    todo, seen, found = [name for name in sys.modules if f"{name}.".startswith(declared)], {"samewise", "__main__"}, dict[str, str]()
    while todo:
        name = todo.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or name in seen or name.startswith("samewise.") or (is_library(Path(file)) and not f"{name}.".startswith(declared)):
            continue
        seen.add(name)
        found[_named(name, Path(file))] = _digest(file)
        todo += _imported(name, Path(file))
    return dict(sorted(found.items()))


def list_changes(folder: RunFolder) -> list[str]:
    """What has changed in the code that a run was started with, as sentences. Empty if nothing was recorded.

    Raises:
        ConfigError: the record is damaged.
    """
    return [told for name, digest in _recorded(folder).items() if (told := _difference(name, digest))]


def differences(first: RunFolder, second: RunFolder) -> list[str]:
    """The names of files that two runs used and that were not the same."""
    one, two = _recorded(first), _recorded(second)
    return [name for name in one if name in two and one[name] != two[name]]


def warn_of_changes(folder: RunFolder) -> None:
    """Say what is other now in the code of a run that is used all the same."""
    for told in list_changes(folder):
        print(f"warning: {told}; the run was trained with the earlier version", file=sys.stderr)


def require_same(folder: RunFolder, settings: Callable[[], Any]) -> None:
    """Refuse the result of a run that is done where its code is other now, or say so where that is accepted.

    Args:
        folder: The run's.
        settings: Gives the config's `reproducibility`.

    Raises:
        ConfigError: its code is other, and `other_environment` is refuse.
    """
    told = list_changes(folder)
    if told and settings().other_environment == "refuse":
        hint = "restore it, train under a different name=, or accept the old result with reproducibility.other_environment=record"
        raise ConfigError(Problem(str(folder.path), f"this run was trained with different code: {'; '.join(told)}", hint=hint))
    warn_of_changes(folder)


def _recorded(folder: RunFolder) -> Mapping[str, str]:
    return read_json(folder.sources, shapes.SOURCES) or {}


def _difference(name: str, digest: str) -> str:
    file = _place(name)
    try:
        return "" if file is not None and _digest(str(file)) == digest else f"{name} has changed" if file is not None else f"{name} no longer exists"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def _named(module: str, file: Path) -> str:
    top = module.partition(".")[0]
    for place in getattr(sys.modules.get(top), "__path__", ()):
        if file.absolute().is_relative_to(Path(place).absolute()):
            return f"{top}/{file.absolute().relative_to(Path(place).absolute()).as_posix()}"
    return file.name if module == top else str(file.absolute())


def _place(name: str) -> Path | None:
    """Where a file of that name is now: its package is looked for, and not imported."""
    if os.path.isabs(name):
        return Path(name) if os.path.lexists(name) else None
    top, _, rest = name.partition("/")
    try:
        spec = importlib.util.find_spec(top.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [Path(place, rest) for place in spec.submodule_search_locations or ()] if rest else [Path(spec.origin or "")]
    return next((place for place in places if place.name == name.rpartition("/")[2] and os.path.lexists(place)), None)


def _imported(module: str, file: Path) -> Iterator[str]:
    """The modules, and perhaps names in them, that a module's text imports, and the packages that it lies in."""
    yield module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # compiled
        return
    package = str(getattr(sys.modules[module], "__package__", None) or "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [_above(package, node.level), node.module]))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _above(package: str, level: int) -> str:
    """The package that so many dots mean."""
    return ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""


def _digest(file: str) -> str:
    facts = os.stat(file)
    return _digest_of(file, facts.st_mtime_ns, facts.st_size, facts.st_ino)


@functools.lru_cache(4096)
def _digest_of(file: str, *state: int) -> str:
    """Once for all points of a sweep."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
