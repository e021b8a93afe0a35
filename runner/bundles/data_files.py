"""Lists the files of a run's data by name, size and SHA-256.

The files themselves are not copied. Does not import torch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samewise.runner.config.fingerprint import data_places
from samewise.runner.errors import ConfigError, Problem

Files = dict[str, dict[str, Any]]
_TOLD = 10
_LARGE = 1 << 30


def list_files(whole: Mapping[str, Any], *, hashed: bool = True) -> dict[str, Files]:
    """List the files behind each setting of the data set that is a path on this machine, with
    SHA-256 if `hashed`; a ConfigError if one cannot be read.
    """
    found = dict[str, Files]()
    for key, place in data_places(whole).items():
        files = dict(_below(place))
        size = sum(file.stat().st_size for file in files.values())
        if hashed and size > _LARGE:
            print(
                f"hashing the data of {key}: {len(files)} files, {size / 1e9:.1f} GB; "
                "--no-data-hashes skips this",
                file=sys.stderr,
            )
        found[key] = {name: _facts(file, hashed=hashed) for name, file in files.items()}
    return found


def require(manifest: Mapping[str, Files], whole: Mapping[str, Any]) -> int:
    """Return how many files match the manifest, each counted once.

    ConfigError, naming the first few, if any are missing, different or additional.
    """
    here, problems, agreeing, named = (
        data_places(whole),
        list[Problem](),
        set[str](),
        dict[tuple[str, str], list[str]](),
    )
    for key, files in manifest.items():
        if key not in here:
            problems.append(
                Problem(
                    key,
                    "the run's data were not found",
                    hint=f"set {key}=PLACE to where they are: {len(files)} files, such as "
                    f"{next(iter(files), 'none')}",
                )
            )
            continue
        present = dict(_below(here[key]))
        wrong = [f"{name} is missing" for name in files if name not in present]
        wrong += [
            f"{name} has different content"
            for name in files
            if name in present and not _agrees(present[name], files[name])
        ]
        wrong += [f"{name} is new" for name in present if name not in files]
        # `dataset.root` and `dataset.train.root` are often one folder
        at = os.path.realpath(here[key])
        agreeing |= {at if here[key].is_file() else os.path.join(at, name) for name in files}
        more = f", and {len(wrong) - _TOLD} more" if len(wrong) > _TOLD else ""
        if wrong:
            named.setdefault((f"{'; '.join(wrong[:_TOLD])}{more}", str(here[key])), []).append(key)
    problems += [
        Problem(
            ", ".join(keys), f"the data are not those that the run was trained with: {words}", place
        )
        for (words, place), keys in named.items()
    ]
    if problems:
        raise ConfigError(*problems)
    return len(agreeing)


def _below(place: Path) -> Iterator[tuple[str, Path]]:
    if place.is_file():
        yield place.name, place
        return
    entered = set[str]()
    for at, folders, names in os.walk(place, followlinks=True):
        real = os.path.realpath(at)
        if real in entered:
            # Links: thirty nested folders with two links each to the next are a billion paths
            folders.clear()
            continue
        entered.add(real)
        folders.sort()
        yield from (
            ((file := Path(at, name)).relative_to(place).as_posix(), file)
            for name in sorted(names)
            if Path(at, name).is_file()
        )


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
    return file.stat().st_size == facts["bytes"] and _facts(file, hashed="sha256" in facts) == facts
