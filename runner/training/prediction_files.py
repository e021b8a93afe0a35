"""Expands the input files of a prediction, and writes predictions to a JSON, CSV or COCO file."""

from __future__ import annotations

import csv
import glob
import io
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samewise.runner.errors import ConfigError, Problem, number_of
from samewise.runner.records.files import require_writable, write_atomically, write_json


def expand(paths: Sequence[Path], recipe: Recipe) -> list[Path]:
    """Expand folders and patterns into files, and leave files as they are.

    Args:
        paths: Files; folders, for all files below them that the recipe reads; and patterns such as
            `photos/*.jpg`, with `**` for any depth.
        recipe: The recipe that reads the files.

    Returns:
        The files in the order of `paths`; those of a folder or a pattern are sorted.

    Raises:
        ConfigError: Folders have no such files, or patterns match nothing.
    """
    files, problems = list[Path](), list[Problem]()
    for path in paths:
        # A file's own name may contain `[`, `?` or `*`
        pattern = not os.path.lexists(path) and glob.has_magic(str(path))
        # `glob` returns names in the file system's order
        for each in map(Path, sorted(glob.glob(str(path), recursive=True))) if pattern else [path]:
            below, unreadable = _below(each, recipe) if os.path.isdir(each) else ([each], [])
            if below and unreadable:
                kinds = ", ".join(
                    sorted({Path(name).suffix.lower() or "no extension" for name in unreadable})
                )
                print(
                    f"warning: {each}: {number_of(len(unreadable), 'file')} of other types left "
                    f"out ({kinds})",
                    file=sys.stderr,
                )
            files += below
            if not below:
                problems.append(
                    Problem(
                        str(each),
                        "has no files of a type that the model takes",
                        expected=f"{recipe.takes}: files that end in "
                        f"{', '.join(recipe.extensions)}",
                    )
                    if recipe.extensions
                    else Problem(
                        str(each),
                        f"is a folder, and {type(recipe).__name__} has no `extensions`",
                        expected="files",
                    )
                )
        if pattern and not glob.glob(str(path), recursive=True):
            problems.append(
                Problem(
                    str(path),
                    "no file matches this pattern",
                    hint="** matches folders at any depth",
                )
            )
    ConfigError.raise_all(problems)
    return files


def names(files: Sequence[Path]) -> list[str]:
    """Return a unique name for each file's results: its name without extension, or numbered."""
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
    """Return the files that the recipe reads, and the names of the others, without hidden files."""
    readable, unreadable, ends = list[Path](), list[str](), tuple(recipe.extensions) or "\0"
    for here, folders, files in os.walk(folder):
        # In place, so that os.walk does not enter hidden folders
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [name for name in files if not name.startswith(".")]
        readable += [Path(here, name) for name in visible if name.lower().endswith(ends)]
        unreadable += [name for name in visible if not name.lower().endswith(ends)]
    return sorted(readable), unreadable


if TYPE_CHECKING:
    from samewise.runner.interfaces import Prediction, Recipe

Form = Literal["json", "csv", "coco"]
SUFFIXES: dict[str, Form] = {".json": "json", ".csv": "csv"}


class PredictionFile:
    """A .json or .csv file, written at the end, completely or not at all.

    Holds plain values only, to save memory.

    Args:
        path: The file to write.
        form: Its format; None: by the file's suffix.

    Raises:
        ConfigError: The format does not fit the suffix, or the file cannot be written there.
    """

    def __init__(self, path: Path, form: Form | None) -> None:
        self.path = path
        self.form: Form = form or SUFFIXES[path.suffix.lower()]
        ConfigError.raise_if(
            SUFFIXES[path.suffix.lower()] != ("json" if self.form == "coco" else self.form),
            "--format",
            f"{self.form} cannot be written to this file",
            str(path),
            "NAME.csv for csv, NAME.json for json and coco",
        )
        require_writable("--output", path, file=True)
        self._rows = list[dict[str, Any]]()
        self.files = 0
        self._images = dict[int | str, Path]()

    def add(self, file: Path, prediction: Prediction, outputs: Sequence[Path]) -> None:
        """Add a file's prediction.

        Args:
            file: The input file.
            prediction: Its prediction.
            outputs: The files that were written for it.

        Raises:
            ConfigError: The prediction has no such format, or another image has the same number.
        """
        if self.form == "coco":
            number = int(file.stem) if file.stem.isdecimal() and file.stem.isascii() else file.stem
            ConfigError.raise_if(
                self._images.setdefault(number, file) != file,
                str(file),
                "COCO's image_id is the file's name without its extension, and "
                f"{self._images[number]} has the same",
                number,
                "files with different names",
                "--format json, or csv",
            )
            self._rows += prediction.coco(number)
        elif self.form == "csv":
            self._rows += [{"file": str(file), **row} for row in prediction.rows()]
        else:
            self._rows.append(
                {"file": str(file), **prediction.values(), "files": [str(path) for path in outputs]}
            )
        self.files += 1

    def write(self) -> None:
        """Write the predictions."""
        if self.form != "csv":
            return write_json(self.path, self._rows)
        # `interfaces` imports torch, for which `predict` sets the run's environment variables first
        from samewise.runner.interfaces import plain_cell

        head = list(dict.fromkeys(["file", *(column for row in self._rows for column in row)]))
        text = io.StringIO(newline="")
        rows = ([plain_cell(row.get(column)) for column in head] for row in self._rows)
        csv.writer(text).writerows([[plain_cell(column) for column in head], *rows])
        write_atomically(self.path, text.getvalue())
        return None
