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
    for one in asked:
        pattern = not os.path.lexists(one) and glob.has_magic(str(one))
        for each in map(Path, sorted(glob.glob(str(one), recursive=True))) if pattern else [one]:
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
        if pattern and not glob.glob(str(one), recursive=True):
            problems.append(
                Problem(
                    str(one), "no file matches this pattern", hint="** matches folders at any depth"
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
    made = list[str]()
    for number, file in enumerate(files, start=1):
        name = file.stem
        if times[name] > 1:
            name = f"{name}_{number}"
            while name in taken:
                name += "_"
            taken.add(name)
        made.append(name)
    return made


def _below(folder: Path, recipe: Recipe) -> tuple[list[Path], list[str]]:
    """The files that the recipe reads, and the names of the others.

    Without hidden files and folders, which file managers leave.
    """
    found, left, ends = list[Path](), list[str](), tuple(recipe.extensions) or "\0"
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        seen = [name for name in files if not name.startswith(".")]
        found += [Path(here, name) for name in seen if name.lower().endswith(ends)]
        left += [name for name in seen if not name.lower().endswith(ends)]
    return sorted(found), left
