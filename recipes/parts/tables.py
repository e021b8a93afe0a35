"""Writes tables as CSV files."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.interfaces import plain_cell


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; names and transcripts in it cannot be formulas of a spreadsheet."""
    with open(path, "w", newline="", encoding="utf-8") as handle:
        csv.writer(handle).writerows([plain_cell(value) for value in row] for row in (head, *rows))
