"""Interface of a format of shards: the samples of a shard, and the fields of one."""

import abc
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from samewise.runner.errors import DataError, Problem, nearest

KEY = "__key__"
"""The field with a sample's key, as in WebDataset."""
CLASS = "cls"
"""The field with a sample's class, as in WebDataset."""


class Sample(NamedTuple):
    """A sample as the scan of its shard finds it."""

    key: str
    offset: int
    length: int
    label: str


class Reader(abc.ABC):
    """A format. Its methods raise a ValueError for a damaged shard."""

    @abc.abstractmethod
    def scan(self, path: str, label: str) -> Iterator[Sequence[Sample]]:
        """Yield the samples of each unit of a shard, in order.

        A unit is what is read at once: the whole shard, or a row group of it.

        Args:
            path: The shard.
            label: The field with the label (`label_text`); empty: samples have none.
        """

    @abc.abstractmethod
    def read(
        self, path: str, offset: int, length: int, fields: Sequence[str], *, units: int
    ) -> dict[str, Any]:
        """Return a sample's fields by name, its key among them.

        Args:
            path: The shard.
            offset: The sample's offset, as the scan gave it.
            length: Its length, likewise.
            fields: The requested fields; a format that reads them all returns them all.
            units: Most units to keep in memory.
        """


def label_text(fields: Mapping[str, Any], label: str, where: str) -> str:
    """Return the label among a sample's fields.

    It is the field of that name, else one of the object in the field `json`; if the name is `label`,
    else the field `cls`. Without a name it is empty.

    Raises:
        DataError: There is none, or several.
    """
    if not label:
        return ""
    described = fields.get("json") or {}
    described = json.loads(described) if isinstance(described, bytes | str) else described
    value = fields.get(label, described.get(label, fields.get(CLASS) if label == "label" else None))
    # Other bytes than a text's, such as an image's, stay bytes
    with suppress(UnicodeDecodeError):
        value = value.decode().strip() if isinstance(value, bytes) else value
    if not isinstance(value, int | str) or value == "":
        reason = f"has no single label {label!r}"
        hint = "dataset.label=NAME names the column, the member or the field of .json"
        raise DataError(Problem(where, reason, value, "a number or a text", hint))
    return str(value)


def require_label(path: str, label: str, names: Collection[str]) -> None:
    """Raise a DataError unless a table may have the label (`label_text`) in one of its columns."""
    if label and not {label, "json", *([CLASS] if label == "label" else [])} & {*names}:
        require_column(path, label, names)


def require_column(path: str, name: str, names: Collection[str]) -> None:
    """Raise a DataError that shows the nearest name unless a table has the column."""
    if name not in names:
        reason, expected = "has no column of this name", ", ".join(names)
        raise DataError(Problem(path, reason, name, expected, nearest(name, names)))
