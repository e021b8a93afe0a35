"""Copy the code that a job will run, so that later edits do not affect it."""

import hashlib
import importlib.util
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.processes.this_process import PROJECT
from samewise.runner.processes.variables import HASH_SEED
from samewise.runner.records import sources
from samewise.runner.records.files import files_below
from samewise.runner.records.sweep_folder import SweepFolder

_LARGE = 16 << 20
"""Bytes; a larger file is data in a package, and is linked."""
CONFIGS = "project_configs"
"""Folder of a copy that holds the project's config files."""


def snapshot(sweep: SweepFolder) -> Path:
    """Copy the code to SWEEP/code/DIGEST, unless it is there, and return that folder.

    The copy holds samewise's files, the project's packages and config folders, and other code that
    the points reach; nothing installed.

    Args:
        sweep: The sweep's folder; its facts name the packages, and the config folders in the order
            of search.
    """
    packages, configs = sweep.facts.get("packages", ()), sweep.facts.get("configs", ())
    files = collect_sources(
        packages, [Path(folder) for folder in configs], sources.files_in(sweep.sources)
    )
    settings = settings_text(packages, configs=CONFIGS if configs else "")
    target = sweep.path.absolute() / "code" / _digest(files, settings)
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{uuid.uuid4().hex}")
        _copy(files, unfinished)
        (unfinished / CONFIGS).mkdir(exist_ok=True)
        (unfinished / "pyproject.toml").write_text(settings, encoding="utf-8")
        try:
            unfinished.rename(target)
        except OSError:
            shutil.rmtree(unfinished)
            # Another process may have been faster
            if not target.is_dir():
                raise
    return target


def collect_sources(
    packages: Sequence[str], configs: Sequence[Path], reached: Iterable[str]
) -> list[tuple[Path, Path]]:
    """Return the files to copy, each with its place in the copy.

    Args:
        packages: The project's packages.
        configs: Its config folders, in the order of search.
        reached: Labels of files that the points reach.
    """
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
    files = [
        (Path(name, file.relative_to(folder)), file)
        for name, folder in folders.items()
        for file in files_below(folder, hidden=False)
    ]
    files += [
        (Path(label), file)
        for label in labels
        if "/" not in label and (file := sources.place(label)) is not None
    ]
    # The first folder takes precedence, so it is copied last
    for folder in reversed(configs):
        files += [
            (Path(CONFIGS, file.relative_to(folder)), file)
            for file in files_below(folder, hidden=False)
        ]
    return files


def variables(code: Path) -> Mapping[str, str]:
    """Return variables with which Python imports samewise and the project from the copy."""
    python_path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(code), *([python_path] if python_path else [])]),
        "PYTHONSAFEPATH": "1",
        PROJECT: str(code),
    } | HASH_SEED


def _package_folder(name: str) -> Path | None:
    """Return the folder of a package of the project.

    None if the package is installed, a single file, or missing.
    """
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return None if not places or sources.is_library(Path(places[0])) else Path(places[0])


def settings_text(packages: Sequence[str], **options: str) -> str:
    """Return a copy's pyproject.toml.

    Args:
        packages: The project's packages.
        options: Other settings; empty ones are left out.
    """
    settings = {
        "packages": list(packages),
        **{key: value for key, value in options.items() if value},
    }
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    return "".join(["[tool.samewise]\n", *lines])


def _digest(files: Iterable[tuple[Path, Path]], settings: str) -> str:
    """Return a short digest of files and settings; of large files only path, size and time."""
    total = hashlib.sha256(settings.encode())
    for name, file in files:
        facts = file.stat()
        body: Any = (
            f"{file} {facts.st_size} {facts.st_mtime_ns}".encode()
            if facts.st_size > _LARGE
            else file.read_bytes()
        )
        # With their lengths, so that the bytes of two files cannot be divided differently
        total.update(f"{name} {len(body)}\n".encode() + body)
    return total.hexdigest()[:12]


def _copy(files: Iterable[tuple[Path, Path]], target: Path) -> None:
    """Copy files to their places."""
    for name, file in files:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        # A file of another config folder may be there as a link, through which the copy would be
        # written
        place.unlink(missing_ok=True)
        if file.stat().st_size > _LARGE:
            place.symlink_to(file.resolve())
        else:
            shutil.copy2(file, place)
