"""Rows of a delimited text file, each on one line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from samewise.runner.errors import DataError, Problem, truncate

_UNCLOSED = (
    'is a quote not closed? A quote in a text is written "", and such a text is put in quotes'
)


def delimited_rows(
    path: Path, handle: TextIO, *, delimiter: str, quotes: bool = True, each: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each row's line (from 1) and its values by column.

    The first line has the names of the columns.

    DataError if a field has a line break, since after a quote that is not closed the rows that
    follow would be part of a text; or if a row has more fields than there are columns. csv.Error if
    it is not such a file.

    Args:
        path: The file, for messages.
        handle: Opened with `newline=""`.
        delimiter: Between two fields.
        quotes: A field may be in quotes; otherwise quotes are characters.
        each: What a row stands for, such as "recording".
    """
    table = csv.DictReader(
        handle, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    )
    last = 1
    for row in table:
        broken = next(
            (
                (column, value)
                for column, value in row.items()
                if isinstance(value, str) and "\n" in value
            ),
            None,
        )
        if broken:
            column, value = broken
            reason = f"has a line break in the column {column!r}"
            raise DataError(
                Problem(
                    f"{path}:{last + 1}",
                    reason,
                    truncate(value, 60, ending="…"),
                    f"one line for each {each}",
                    _UNCLOSED,
                )
            )
        last = table.line_num
        if None in row:
            columns = ", ".join(name for name in row if name is not None)
            reason = "has more fields than there are columns; put texts with commas in quotes"
            raise DataError(Problem(f"{path}:{last}", reason, expected=f"the columns {columns}"))
        yield last, row
