"""Tables as CSV files."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.interfaces import plain_cell


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, in which the names of classes and files, and what somebody said, are no formulas of a spreadsheet's."""
    with open(path, "w", newline="", encoding="utf-8") as handle:
        csv.writer(handle).writerows([plain_cell(value) for value in row] for row in (head, *rows))
