"""Selects the rows of a table that belong to a split: by a column, or by a hash."""

from collections import Counter
from collections.abc import Mapping, Sequence

from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.lists import Row
from samewise.datasets.parts.split_files import MEANINGS
from samewise.runner.errors import DataError, Problem, nearest, number_of

_KNOWN = ("train", "valid", "test", "unused")


def select_rows(
    rows: Sequence[Row],
    names: Sequence[str],
    split: str,
    *,
    split_column: str | None,
    shares: Mapping[str, float],
    key: str,
    item: str,
) -> list[str]:
    """Return the names of the rows in a split, in order; `test` may be empty.

    Args:
        rows: The table's rows, at least one.
        names: A name for each row, which differs from all others.
        split: "train", "valid" or "test".
        split_column: The column that says "train", "valid" or "test" (or "val", "validation", ...),
            or "unused"; None: a hash of each name decides.
        shares: Shares of `valid` and `test`, parts of 1, by hash (`parts.keyed_split`).
        key: The hash's key.
        item: The noun for what a row describes.

    Raises:
        DataError: The column has another value, or `train` or `valid` has no row.
        ConfigError: The shares are not valid.
    """
    path = rows[0].path
    if split_column is None:
        return select_split(names, split, shares, key=key, where=str(path))
    splits = [row.text(split_column, setting="split_column") for row in rows]
    meanings = [_split_named(value) for value in splits]
    if unknown := Counter(x for x in splits if _split_named(x) not in _KNOWN):
        ((value, count),) = unknown.most_common(1)
        raise DataError(
            Problem(
                f"{path}, column {split_column}",
                f"names a split that does not exist, in {number_of(count, 'row')}",
                value,
                ", ".join(_KNOWN),
                nearest(value, _KNOWN) or 'write "unused" for rows that no split should have',
            )
        )
    chosen = [name for name, meaning in zip(names, meanings, strict=True) if meaning == split]
    # A data set may lack a test split
    DataError.raise_if(
        not chosen and split != "test",
        str(path),
        f"has no {item} for the split {split}",
        sorted(set(meanings)),
        "train, valid and test",
    )
    return chosen


def _split_named(value: str) -> str:
    text = value.strip().lower()
    return MEANINGS.get(text, text)
