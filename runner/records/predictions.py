"""Writes the predictions for many files into one: JSON, CSV, or COCO's results."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.files import require_writable, write_atomically, write_json

if TYPE_CHECKING:
    from samewise.runner.interfaces import Prediction

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
        if SUFFIXES[path.suffix.lower()] != ("json" if self.form == "coco" else self.form):
            raise ConfigError(
                Problem(
                    "--format",
                    f"{self.form} cannot be written to this file",
                    str(path),
                    "NAME.csv for csv, NAME.json for json and coco",
                )
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
            if self._images.setdefault(number, file) != file:
                message = (
                    "COCO's image_id is the file's name without its extension, and "
                    f"{self._images[number]} has the same"
                )
                raise ConfigError(
                    Problem(
                        str(file),
                        message,
                        number,
                        "files with different names",
                        "--format json, or csv",
                    )
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
