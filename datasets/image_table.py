"""Images and labels listed in a table: CSV, JSON, JSON lines or Parquet."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

from samewise.datasets.parts.classes import require_count, require_known, sort_classes
from samewise.datasets.parts.delimited import delimited_rows
from samewise.datasets.parts.image_files import Cache, DecodedBy, ImageFiles, ImageMode
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.limits import BYTES, ROWS, read_text, require_regular
from samewise.runner.errors import ConfigError, DataError, Problem, first_line, nearest, number_of

_SPLITS = {
    "training": "train",
    "val": "valid",
    "validation": "valid",
    "dev": "valid",
    "testing": "test",
}
_KNOWN = ("train", "valid", "test", "unused")
_PLAIN = ("string", "large_string", "bool", "null")
_ROWS_AT_ONCE = 65_536
_FORMS = (
    "a .csv, .tsv, .json (a list of objects), .jsonl or .parquet file with a row for each image"
)


@final
class ImageTable(ImageFiles):
    """Samples `{"image": uint8[C, H, W], "label": int}`.

    Labels number the classes, sorted: by number where all are numbers.

    Args:
        table_path: The table; .parquet is read by pyarrow, which MLflow brings.
        split: "train", "valid" or "test".
        root: What the images' names are relative to; None: the table's folder.
        image: The column of the images' files.
        label: The column of their classes.
        split_column: The column that says "train", "valid" or "test" (or "val", "validation", ...),
            or "unused"; None: a hash of each image's name decides.
        shares: Of `valid` and `test`, by hash (`parts.keyed_split`).
        key: Of the hash: another key splits otherwise.
        classes: The labels in the order of their numbers; None: all that occur in any split.
        num_classes: How many there should be; None: as many as there are.
        mode, channels, cache, decode, transform: As in `ImageFiles`.

    Raises: DataError: the table cannot be read, or lacks a column; an image is missing; there are
        other classes. ConfigError: it is a Parquet file, and pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        table_path: str,
        split: Literal["train", "valid", "test"],
        root: str | None = None,
        image: str = "image",
        label: str = "label",
        split_column: str | None = None,
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        mode: ImageMode = "rgb",
        channels: int | None = None,
        cache: Cache = "none",
        decode: DecodedBy = "worker",
        transform: Transform | None = None,
    ) -> None:
        path = Path(table_path).expanduser()
        folder = Path(root).expanduser() if root is not None else path.parent
        columns = {
            "image": image,
            "label": label,
            **({"split_column": split_column} if split_column else {}),
        }
        rows = _rows(path, columns)
        names = [_relative(str(row[image]), folder) for row in rows]
        if twice := next(
            (name for name, times in Counter(map(os.path.normpath, names)).items() if times > 1),
            None,
        ):
            raise DataError(
                Problem(str(path), "lists an image twice", twice, "a row for each image")
            )
        labels = dict(zip(names, (str(row[label]) for row in rows), strict=True))
        if spaced := next((label for label in labels.values() if label != label.strip()), None):
            raise DataError(
                Problem(
                    str(path),
                    "has a label with a space at its end",
                    spaced,
                    spaced.strip(),
                    "it would be a class of its own",
                )
            )
        known = list(map(str, classes)) if classes is not None else sort_classes(labels.values())
        require_known(str(path), labels, known)
        require_count(str(path), known, num_classes)
        if split_column:
            told = {
                name: _split_named(row[split_column]) for name, row in zip(names, rows, strict=True)
            }
            if others := Counter(
                str(row[split_column])
                for row in rows
                if _split_named(row[split_column]) not in _KNOWN
            ):
                ((other, count),) = others.most_common(1)
                hint = nearest(other, _KNOWN) or 'write "unused" for rows that no split should have'
                where, words = (
                    f"{path}, column {split_column}",
                    f"names a split that does not exist, in {number_of(count, 'row')}",
                )
                raise DataError(Problem(where, words, other, ", ".join(_KNOWN), hint))
            chosen = [name for name in names if told[name] == split]
            if not chosen and split != "test":
                raise DataError(
                    Problem(
                        str(path),
                        f"has no image for the split {split}",
                        sorted(set(told.values())),
                        "train, valid and test",
                    )
                )
        else:
            chosen = select_split(names, split, shares, key=key, where=str(path))
        if missing := [name for name in chosen if not os.path.isfile(folder / name)]:
            hint = "set dataset.root=FOLDER to the folder that the names are relative to"
            raise DataError(
                Problem(
                    str(folder / missing[0]),
                    f"is listed in {path.name} but missing ({len(missing)} missing in all)",
                    hint=hint,
                )
            )
        number = {name: place for place, name in enumerate(known)}
        chosen_labels = [number[labels[name]] for name in chosen]
        super().__init__(
            folder,
            chosen,
            chosen_labels,
            classes=known,
            mode=mode,
            channels=channels,
            cache=cache,
            decode=decode,
            transform=transform,
        )


def _rows(path: Path, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """The table's rows, with the requested columns."""
    try:
        rows = _read(path, list(columns.values()))
    except OSError as error:
        raise DataError(
            Problem(
                str(path),
                f"the table cannot be read: {error.strerror}",
                hint="set dataset.table_path=FILE",
            )
        ) from None
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(
            Problem(
                str(path),
                f"is not such a table, or is damaged: {first_line(error)}",
                expected=_FORMS,
            )
        ) from None
    if not rows:
        raise DataError(Problem(str(path), "has no rows", expected=_FORMS))
    for number, row in enumerate(rows, start=1):
        for key, column in columns.items():
            value = row.get(column) if isinstance(row, dict) else None
            if (
                value is None or value != value or not str(value).strip()
            ):  # NaN, which programs write for what is missing, differs from itself
                there = list(row) if isinstance(row, dict) else []
                if column in there:
                    raise DataError(
                        Problem(
                            str(path),
                            f"row {number} has an empty {column!r}",
                            hint="fill it in, or leave the row out",
                        )
                    )
                hint = nearest(column, there) or f"set dataset.{key} to the column's name"
                raise DataError(
                    Problem(
                        str(path),
                        f"row {number} has no {column!r}",
                        expected=f"columns: {', '.join(there)}",
                        hint=hint,
                    )
                )
            if isinstance(value, (list, dict)):
                raise DataError(
                    Problem(
                        f"{path}, row {number}, {column}",
                        "holds several values",
                        value,
                        "one text or number",
                    )
                )
    return rows


def _read(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    form = path.suffix.lower()
    if form == ".parquet":
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                Problem(
                    "dataset.table_path",
                    "a Parquet file requires pyarrow, which is not installed",
                    hint="pip install pyarrow",
                )
            )
        require_regular(path, whole=False)
        return _rows_of_parquet(path, columns)
    text = read_text(path)
    if form in (".csv", ".tsv"):
        text, delimiter = text.removeprefix("\ufeff"), "\t" if form == ".tsv" else ","
        names = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
        if twice := next((name for name in columns if names.count(name) > 1), None):
            raise ValueError(f"it has two columns {twice!r}")
        return [
            row
            for _, row in delimited_rows(
                path, io.StringIO(text, newline=""), delimiter=delimiter, each="image"
            )
        ]
    if form in (".jsonl", ".ndjson"):
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    if form != ".json":
        raise ValueError(f"{form or 'no extension'} is not a supported extension")
    rows = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError("it is not a list")
    return rows


def _rows_of_parquet(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """A repeated value is stored once, so the file's size does not limit its unpacked size."""
    from pyarrow import compute, parquet  # pyright: ignore[reportMissingImports]

    with parquet.ParquetFile(path) as file:
        ROWS.check(path, file.metadata.num_rows)
        held = {
            field.name: str(
                field.type.value_type if hasattr(field.type, "index_type") else field.type
            )
            for field in file.schema_arrow
        }
    asked = [name for name in columns if name in held]
    if not asked:
        return [dict.fromkeys(held)]
    for name in asked:
        if held[name] not in _PLAIN and not held[name].startswith(
            ("int", "uint", "float", "double")
        ):
            raise ValueError(f"its column {name!r} holds {held[name]}, not text or numbers")
    rows, size = list[dict[str, Any]](), 0
    with parquet.ParquetFile(
        path, read_dictionary=[name for name in asked if "string" in held[name]]
    ) as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=asked):
            for column in batch.columns:
                lengths = (
                    compute.binary_length(column.dictionary).take(column.indices)
                    if hasattr(column, "dictionary")
                    else None
                )
                size += column.nbytes if lengths is None else compute.sum(lengths).as_py() or 0
            BYTES.check(path, size)
            rows += batch.to_pylist()
    return rows


def _split_named(value: Any) -> str:
    text = str(value).strip().lower()
    return _SPLITS.get(text, text)


def _relative(name: str, folder: Path) -> str:
    """The path relative to the folder if it is inside, so that split and fingerprint do not depend
    on the folder's location.
    """
    return (
        str(Path(name).relative_to(folder))
        if os.path.isabs(name) and Path(name).is_relative_to(folder)
        else name
    )
