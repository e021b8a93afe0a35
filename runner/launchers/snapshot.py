"""Copies the code that a job will run, so that later edits do not affect it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.processes.this_process import PROJECT
from samewise.runner.processes.variables import HASH_SEED
from samewise.runner.records import sources
from samewise.runner.records.sweep_folder import SweepFolder

_LARGE = 16 << 20  # bytes; a larger file is data in a package, and is linked
CONFIGS = "project_configs"
"""The folder in it that holds the project's config files."""


def snapshot(sweep: SweepFolder) -> Path:
    """Copy samewise's files, the project's packages and config folders, and other code that the
    points reach, to SWEEP/code/DIGEST; nothing installed.

    Returns the folder with the copy, one for each state of the code.

    Args:
        sweep: The sweep's folder; its facts name the packages and the config folders, the first
            searched first.
    """
    packages, configs = sweep.facts.get("packages", ()), sweep.facts.get("configs", ())
    found = collect_sources(
        packages, [Path(folder) for folder in configs], sources.files_in(sweep.sources)
    )
    settings = settings_text(packages, configs=CONFIGS if configs else "")
    target = sweep.path.absolute() / "code" / _digest(found, settings)
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        making = target.with_name(f".{uuid.uuid4().hex}")
        _copy(found, making)
        (making / CONFIGS).mkdir(exist_ok=True)
        (making / "pyproject.toml").write_text(settings, encoding="utf-8")
        try:
            making.rename(target)
        except OSError:
            shutil.rmtree(making)
            if not target.is_dir():  # another process was faster
                raise
    return target


def collect_sources(
    packages: Sequence[str], configs: Sequence[Path], reached: Iterable[str]
) -> list[tuple[Path, Path]]:
    """The files to copy, each with its place in the copy."""
    import samewise

    folders = {"samewise": Path(samewise.__path__[0])}
    labels = list(reached)
    for name in dict.fromkeys(
        [
            *(package.partition(".")[0] for package in packages),
            *(label.partition("/")[0] for label in labels if "/" in label),
        ]
    ):
        if (folder := _package_folder(name)) is not None:
            folders[name] = folder
    found = [
        (Path(name, file.relative_to(folder)), file)
        for name, folder in folders.items()
        for file in _files(folder)
    ]
    found += [
        (Path(label), file)
        for label in labels
        if "/" not in label and (file := sources.place(label)) is not None
    ]
    for folder in reversed(configs):  # copied last, since the first takes precedence
        found += [(Path(CONFIGS, file.relative_to(folder)), file) for file in _files(folder)]
    return found


def variables(code: Path) -> Mapping[str, str]:
    """Environment variables with which Python processes import samewise and the project from the
    copy.
    """
    before = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(code), *([before] if before else [])]),
        "PYTHONSAFEPATH": "1",
        PROJECT: str(code),
    } | HASH_SEED


def _package_folder(name: str) -> Path | None:
    """The folder of a package of the project.

    None if it is installed, a single file, or missing.
    """
    found = importlib.util.find_spec(name)
    places = list(found.submodule_search_locations or ()) if found else []
    if not places or sources.is_library(Path(places[0])):
        return None
    return Path(places[0])


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder in a fixed order, following links, without caches and hidden files."""
    seen = set[str]()
    for at, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(at)
        folders[:] = (
            []
            if real in seen
            else sorted(
                name for name in folders if name != "__pycache__" and not name.startswith(".")
            )
        )
        if real not in seen:
            seen.add(real)
            yield from (Path(at, name) for name in sorted(names) if not name.startswith("."))


def settings_text(packages: Sequence[str], **others: str) -> str:
    """The pyproject.toml of a copy, with these packages and those other settings that are not
    empty.
    """
    settings = {
        "packages": list(packages),
        **{key: value for key, value in others.items() if value},
    }
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    return "".join(["[tool.samewise]\n", *lines])


def _digest(files: Iterable[tuple[Path, Path]], settings: str) -> str:
    total = hashlib.sha256(settings.encode())
    for name, file in files:
        facts = file.stat()
        body: Any = (
            f"{file} {facts.st_size} {facts.st_mtime_ns}".encode()
            if facts.st_size > _LARGE
            else file.read_bytes()
        )
        total.update(f"{name} {len(body)}\n".encode() + body)
    return total.hexdigest()[:12]


def _copy(files: Iterable[tuple[Path, Path]], target: Path) -> None:
    """Copy with modification times, so that compiled Python files stay valid and are copied too."""
    for name, file in files:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        if file.stat().st_size > _LARGE:
            place.symlink_to(file.resolve())
            continue
        shutil.copy2(file, place)
        compiled = (
            Path(importlib.util.cache_from_source(str(file))) if file.suffix == ".py" else None
        )
        if compiled and compiled.is_file():
            (place.parent / "__pycache__").mkdir(exist_ok=True)
            shutil.copy2(compiled, place.parent / "__pycache__" / compiled.name)
