"""Columns of numbers in a table, CSV, JSON, JSON lines or Parquet, to learn other columns from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.in_memory import NumberRows
from samewise.datasets.parts.lists import numbers_in, read_rows
from samewise.datasets.parts.table_splits import select_rows


@final
class NumberTable(NumberRows):
    """Samples `{"features": float32[F], "label": float32[T]}`, one for each row of a table.

    Args:
        table_path: The table; pyarrow, a dependency of MLflow, reads .parquet.
        split: "train", "valid" or "test".
        features: The columns to learn from.
        targets: The columns to predict.
        id: A column that names each row, such as a patient: rows of one name share their split.
            None: the row's number.
        split_column: The column that says "train", "valid" or "test" (or "val", "validation", ...),
            or "unused"; None: a hash of each row's name decides.
        shares: Shares of `valid` and `test`, parts of 1, by hash (`parts.keyed_split`).
        key: The hash's key: another key splits differently.

    Raises:
        DataError: The table cannot be read, lacks a column, or has something else than a finite
            number in one of them.
        ConfigError: The table is a Parquet file, and pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        table_path: str,
        split: Literal["train", "valid", "test"],
        features: Sequence[str],
        targets: Sequence[str],
        id: str | None = None,
        split_column: str | None = None,
        shares: Mapping[str, float],
        key: str = "",
    ) -> None:
        columns = [*features, *targets, *(name for name in (id, split_column) if name)]
        rows = read_rows(
            Path(table_path).expanduser(), columns, item="sample", setting="dataset.table_path"
        )
        names = [row.text(id, setting="id") if id else str(row.number) for row in rows]
        chosen = set(
            select_rows(
                rows, names, split, split_column=split_column, shares=shares, key=key, item="row"
            )
        )
        selected = [row for row, name in zip(rows, names, strict=True) if name in chosen]
        super().__init__(
            list(targets),
            features=numbers_in(selected, features, setting="features"),
            label=numbers_in(selected, targets, setting="targets"),
        )
