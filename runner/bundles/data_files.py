"""Lists the files of a run's data by name, size and SHA-256, and does not copy them.

Does not import torch.
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samewise.runner.config.fingerprint import data_places
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.files import files_below

Files = dict[str, dict[str, Any]]
_SHOWN = 10
_LARGE = 1 << 30


def list_files(whole: Mapping[str, Any], *, hashed: bool = True) -> dict[str, Files]:
    """List the files behind each setting of the data set that is a path on this machine.

    Args:
        whole: The config.
        hashed: Whether to read all files for their SHA-256.

    Raises:
        ConfigError: A file cannot be read.
    """
    listing = dict[str, Files]()
    for key, place in data_places(whole).items():
        files = _files_at(place)
        size = sum(file.stat().st_size for file in files.values())
        if hashed and size > _LARGE:
            print(
                f"hashing the data of {key}: {len(files)} files, {size / 1e9:.1f} GB; "
                "--no-data-hashes skips this",
                file=sys.stderr,
            )
        listing[key] = {name: _facts(file, hashed=hashed) for name, file in files.items()}
    return listing


def require(manifest: Mapping[str, Files], whole: Mapping[str, Any]) -> int:
    """Return the number of files that match the manifest, each counted once.

    Raises:
        ConfigError: Files are missing, different or additional; the first few are named.
    """
    places, problems, matches = data_places(whole), list[Problem](), set[str]()
    # `dataset.root` and `dataset.train.root` are often one folder: its problems are reported once
    keys_by_message = dict[tuple[str, str], list[str]]()
    for key, files in manifest.items():
        if key not in places:
            problems.append(
                Problem(
                    key,
                    "the run's data were not found",
                    hint=f"set {key}=PLACE to where they are: {len(files)} files, such as "
                    f"{next(iter(files), 'none')}",
                )
            )
            continue
        present = _files_at(places[key])
        differences = [f"{name} is missing" for name in files if name not in present]
        differences += [
            f"{name} has different content"
            for name in files
            if name in present and not _agrees(present[name], files[name])
        ]
        differences += [f"{name} is new" for name in present if name not in files]
        path = os.path.realpath(places[key])
        matches |= {path if places[key].is_file() else os.path.join(path, name) for name in files}
        if differences:
            hidden = len(differences) - _SHOWN
            more = f", and {hidden} more" if hidden > 0 else ""
            message = f"{'; '.join(differences[:_SHOWN])}{more}"
            keys_by_message.setdefault((message, str(places[key])), []).append(key)
    problems += [
        Problem(
            ", ".join(keys),
            f"the data are not those that the run was trained with: {message}",
            place,
        )
        for (message, place), keys in keys_by_message.items()
    ]
    ConfigError.raise_all(problems)
    return len(matches)


def _files_at(place: Path) -> dict[str, Path]:
    """Return the files at a place, a file or a folder, by their names in it."""
    files = [place] if place.is_file() else files_below(place, hidden=True)
    base = place.parent if place.is_file() else place
    return {file.relative_to(base).as_posix(): file for file in files}


def _facts(file: Path, *, hashed: bool) -> dict[str, Any]:
    try:
        with open(file, "rb") as handle:
            return {
                "bytes": os.fstat(handle.fileno()).st_size,
                **({"sha256": hashlib.file_digest(handle, "sha256").hexdigest()} if hashed else {}),
            }
    except OSError as error:
        raise ConfigError(Problem(str(file), f"cannot be read: {error.strerror}")) from None


def _agrees(file: Path, facts: Mapping[str, Any]) -> bool:
    # The size first, since hashing reads the whole file
    return file.stat().st_size == facts["bytes"] and _facts(file, hashed="sha256" in facts) == facts
