"""Reads lists and tables of samples: CSV, TSV, JSON, JSON lines and Parquet.

Each row knows its place in the file, for messages.
"""

import codecs
import csv
import importlib.util
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samewise.datasets.parts.file_kinds import another_kind
from samewise.datasets.parts.limits import BYTES, ROWS, read_bytes, require_regular
from samewise.runner.errors import (
    ConfigError,
    DataError,
    Problem,
    did_you_mean,
    first_line,
    truncate,
)

FORMS = "a .csv, .tsv, .json, .jsonl or .parquet file with a row for each"
# UTF-32's marks begin with UTF-16's, so they come first
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks and their encodings."""
_PLAIN = ("string", "large_string", "bool", "null")
_ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class Row:
    """Values of a row, by column.

    Args:
        path: The file.
        number: The number of its line, or of the row if the file has no lines; from 1.
        values: Values by the columns' names.
        is_line: Whether `number` counts lines.
    """

    path: Path
    number: int
    values: Mapping[str, Any]
    is_line: bool = True

    @property
    def where(self) -> str:
        """The row's place, for messages."""
        return f"{self.path}:{self.number}" if self.is_line else f"{self.path}, row {self.number}"

    def text(self, column: str, *, setting: str = "", blank: bool = False) -> str:
        """Return the text or number in a column, as text.

        Args:
            column: The column's name.
            setting: The key of `dataset` that names the column; empty: none does.
            blank: Whether the text may be empty.

        Raises:
            DataError: The column does not exist, is empty, or holds several values.
        """
        value = self.values.get(column)
        if isinstance(value, list | dict):
            raise DataError(
                Problem(
                    self.where,
                    f"holds several values in the column {column!r}",
                    value,
                    "one text or number",
                )
            )
        # NaN, which programs write for what is missing, differs from itself
        if value is not None and value == value and (blank or str(value).strip()):
            return str(value)
        if column in self.values:
            raise DataError(
                Problem(
                    self.where,
                    f"has nothing in the column {column!r}",
                    hint="fill it in, or leave the row out",
                )
            )
        columns = [str(name) for name in self.values]
        raise DataError(
            Problem(
                self.where,
                f"has no column {column!r}, only {', '.join(columns)}",
                hint=did_you_mean(column, columns)
                or (
                    f"set dataset.{setting} to the column's name; the first line of a "
                    "table names its columns"
                    if setting
                    else ""
                ),
            )
        )


def numbers_in(rows: Sequence[Row], columns: Sequence[str], *, setting: str = "") -> Tensor:
    """Return the numbers in columns of a table, float32[N, K].

    Args:
        rows: The table's N rows.
        columns: Names of K columns.
        setting: The key of `dataset` that names the columns; empty: none does.

    Raises:
        DataError: A column does not exist, or has something that is not a finite number.
    """
    numbers = torch.empty(len(rows), len(columns))
    for place, row in enumerate(rows):
        for column, name in enumerate(columns):
            text = row.text(name, setting=setting)
            try:
                numbers[place, column] = float(text)
            except ValueError:
                numbers[place, column] = math.nan
            if not numbers[place, column].isfinite():
                raise DataError(
                    Problem(
                        row.where,
                        f"does not have a finite number in the column {name!r}",
                        text,
                        "a number with a decimal point",
                    )
                )
    return numbers


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a text in UTF-8, or as its byte order mark says; all line ends become newlines.

    Raises:
        DataError: The file is not such a text, or is too large.
        OSError: It cannot be read.
    """
    return text_of(read_bytes(path), os.fspath(path))


def text_of(raw: bytes, where: str) -> str:
    """Return bytes as `read_text` returns a file's; `where` names them in errors.

    Raises:
        DataError: They are no such text.
    """
    encoding = next((name for mark, name in _MARKS if raw.startswith(mark)), "utf-8")
    try:
        return raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        description = another_kind(raw, "text")
        raise DataError(
            Problem(
                where,
                f"is {description}, not a text" if description else f"is not valid text: {error}",
                expected="text in UTF-8",
            )
        ) from None


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Read the lines of a text that are not blank; otherwise as `read_text`."""
    return [line for line in read_text(path).split("\n") if line.strip()]


def read_rows(
    path: Path, columns: Sequence[str], *, item: str, setting: str, tab_quotes: bool = True
) -> list[Row]:
    """Read all rows of a table.

    The ending `.parquet` marks a Parquet file. Other files are recognised by their first character
    (`[` begins a JSON list, `{` JSON lines), else by the separator in their first line.

    Args:
        path: The table.
        columns: The columns that are needed.
        item: The noun for what a row describes, such as "recording".
        setting: The key of `dataset` that names the table.
        tab_quotes: Whether fields between tabs may be in quotes; otherwise quotes are characters.

    Raises:
        DataError: The file cannot be read, is damaged, or has no rows.
        ConfigError: It is a Parquet file, and pyarrow is not installed.
    """
    try:
        rows = (
            _parquet_rows(path, columns)
            if path.suffix.lower() == ".parquet"
            else list(_text_rows(path, columns, item=item, tab_quotes=tab_quotes))
        )
    except OSError as error:
        raise DataError(
            Problem(
                str(path),
                f"the list of {item}s cannot be read: {error.strerror}",
                hint=f"set {setting}=FILE",
            )
        ) from None
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(
            Problem(
                str(path),
                f"is not a list of {item}s, or is damaged: {first_line(error)}",
                expected=f"{FORMS} {item}",
            )
        ) from None
    DataError.raise_if(not rows, str(path), "has no rows", expected=f"{FORMS} {item}")
    return rows


def _text_rows(path: Path, columns: Sequence[str], *, item: str, tab_quotes: bool) -> Iterator[Row]:
    text = read_text(path)
    start = text.lstrip()[:1]
    if start == "[":
        for number, values in enumerate(json.loads(text), start=1):
            yield _object(Row(path, number, values, is_line=False))
    elif start == "{":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(Problem(f"{path}:{number}", f"is not JSON: {error}")) from None
                yield _object(Row(path, number, values))
    else:
        yield from _delimited_rows(path, text, columns, item=item, tab_quotes=tab_quotes)


def _object(row: Row) -> Row:
    if not isinstance(row.values, dict):
        raise DataError(Problem(row.where, "is not a JSON object", row.values))
    return row


def _delimited_rows(
    path: Path, text: str, columns: Sequence[str], *, item: str, tab_quotes: bool
) -> Iterator[Row]:
    """Yield the rows of a delimited text, each on one line below the columns' names."""
    head = text.partition("\n")[0]
    # Where the comma is the decimal mark, programs separate columns by semicolons
    order = "\t,;" if path.suffix.lower() == ".tsv" else ",\t;"
    delimiter = next((mark for mark in order if mark in head), order[0])
    quoting = csv.QUOTE_NONE if delimiter == "\t" and not tab_quotes else csv.QUOTE_MINIMAL
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting)
    names = list(table.fieldnames or ())
    if repeated := next((name for name in columns if names.count(name) > 1), None):
        raise ValueError(f"it has two columns {repeated!r}")
    last = 1
    for values in table:
        for column, value in values.items():
            # After an unclosed quote, the following rows would silently become part of a field
            if isinstance(value, str) and "\n" in value:
                raise DataError(
                    Problem(
                        f"{path}:{last + 1}",
                        f"has a line break in the column {column!r}",
                        truncate(value, 60, ending="…"),
                        f"one line for each {item}",
                        'is a quote not closed? A quote in a text is written "", and such a text '
                        "is put in quotes",
                    )
                )
        last = table.line_num
        if None in values:
            raise DataError(
                Problem(
                    f"{path}:{last}",
                    "has more fields than there are columns; put texts with commas in quotes",
                    expected=f"the columns {', '.join(names)}",
                )
            )
        yield Row(path, last, values)


def _parquet_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Read the requested columns that exist; if none does, one row with all columns' names."""
    ConfigError.raise_if(
        importlib.util.find_spec("pyarrow") is None,
        str(path),
        "a Parquet file requires pyarrow, which is not installed",
        hint="pip install pyarrow",
    )
    from pyarrow import compute, parquet  # pyright: ignore[reportMissingImports]

    require_regular(path, into_memory=False)
    with parquet.ParquetFile(path) as file:
        ROWS.check(path, file.metadata.num_rows)
        types = {
            field.name: str(getattr(field.type, "value_type", field.type))
            if hasattr(field.type, "index_type")
            else str(field.type)
            for field in file.schema_arrow
        }
    requested = [name for name in columns if name in types]
    if not requested:
        return [Row(path, 1, dict.fromkeys(types), is_line=False)]
    for name in requested:
        if types[name] not in _PLAIN and not types[name].startswith(
            ("int", "uint", "float", "double")
        ):
            hint = "dataset=hugging_face_images (or _recordings) reads files that a table contains"
            raise DataError(
                Problem(
                    str(path),
                    f"has {types[name]} in the column {name!r}, not text or numbers",
                    hint=hint if "binary" in types[name] else "",
                )
            )
    # Repeated values are stored once, so the file's size does not limit their unpacked size:
    # lengths are counted on the dictionaries, before values are unpacked
    rows, size = list[dict[str, Any]](), 0
    with parquet.ParquetFile(
        path, read_dictionary=[name for name in requested if "string" in types[name]]
    ) as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=requested):
            for column in batch.columns:
                lengths = (
                    compute.binary_length(column.dictionary).take(column.indices)
                    if hasattr(column, "dictionary")
                    else None
                )
                size += column.nbytes if lengths is None else compute.sum(lengths).as_py() or 0
            BYTES.check(path, size)
            rows += batch.to_pylist()
    return [Row(path, number, values, is_line=False) for number, values in enumerate(rows, start=1)]
