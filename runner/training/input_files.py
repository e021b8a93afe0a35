"""Expands the files, folders and patterns for a prediction, in a definite order."""

from __future__ import annotations

import glob
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from samewise.runner.errors import ConfigError, Problem, number_of
from samewise.runner.interfaces import Recipe


def expand(asked: Sequence[Path], recipe: Recipe) -> list[Path]:
    """Files as given.

    For a folder all files below it that the recipe reads, for a pattern (`photos/*.jpg`, `**` for
    any depth) all matches, sorted.

    ConfigError if a folder has none, or a pattern matches nothing, with a problem for each.
    """
    files, problems = list[Path](), list[Problem]()
    for path in asked:
        pattern = not os.path.lexists(path) and glob.has_magic(str(path))
        for each in map(Path, sorted(glob.glob(str(path), recursive=True))) if pattern else [path]:
            below, left = _below(each, recipe) if each.is_dir() else ([each], [])
            if below and left:
                kinds = ", ".join(
                    sorted({Path(name).suffix.lower() or "no extension" for name in left})
                )
                print(
                    f"warning: {each}: {number_of(len(left), 'file')} of other types left "
                    f"out ({kinds})",
                    file=sys.stderr,
                )
            files += below
            if not below:
                expected = (
                    f"{recipe.takes}: files that end in {', '.join(recipe.extensions)}"
                    if recipe.extensions
                    else "files"
                )
                reason = (
                    "has no files of a type that the model takes"
                    if recipe.extensions
                    else f"is a folder, and {type(recipe).__name__} has no `extensions`"
                )
                problems.append(Problem(str(each), reason, expected=expected))
        if pattern and not glob.glob(str(path), recursive=True):
            problems.append(
                Problem(
                    str(path),
                    "no file matches this pattern",
                    hint="** matches folders at any depth",
                )
            )
    if problems:
        raise ConfigError(*problems)
    return files


def names(files: Sequence[Path]) -> list[str]:
    """The prefix for each file's results: its name without extension, numbered if another file has
    the same.
    """
    times, taken = Counter(file.stem for file in files), {file.stem for file in files}
    unique = list[str]()
    for number, file in enumerate(files, start=1):
        name = file.stem
        if times[name] > 1:
            name = f"{name}_{number}"
            while name in taken:
                name += "_"
            taken.add(name)
        unique.append(name)
    return unique


def _below(folder: Path, recipe: Recipe) -> tuple[list[Path], list[str]]:
    """The files that the recipe reads, and the names of the others.

    Without hidden files and folders, which file managers leave.
    """
    readable, unreadable, ends = list[Path](), list[str](), tuple(recipe.extensions) or "\0"
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [name for name in files if not name.startswith(".")]
        readable += [Path(here, name) for name in visible if name.lower().endswith(ends)]
        unreadable += [name for name in visible if not name.lower().endswith(ends)]
    return sorted(readable), unreadable
