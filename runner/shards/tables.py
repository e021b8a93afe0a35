"""Parquet and Arrow files: a row is a sample, a row group or record batch is read at once."""

import abc
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, final

import pyarrow as pa
from pyarrow import parquet

from samewise.runner.shards import storage
from samewise.runner.shards.reader import (
    KEY,
    Label,
    Reader,
    Sample,
    content_of,
    require_column,
    require_label,
)

_Opened = tuple[Sequence[str], int, Callable[[int, list[str]], Any]]
_KEPT = defaultdict[str, OrderedDict[Any, Any]](OrderedDict)
"""This process's unpacked groups of each folder, the last used one last."""


class _Tables(Reader):
    """Reads the rows of a file group by group: a sample's offset is its group, its length its row.

    A row's key is in the column `__key__`, or else is made of the file's name and the row's number.
    """

    @abc.abstractmethod
    def opened(self, path: str) -> AbstractContextManager[_Opened]:
        """Return the columns' names, the number of groups, and what reads columns of a group."""

    def scan(self, path: str, label: Label) -> Iterator[Sequence[Sample]]:
        row = 0
        with self.opened(path) as (names, count, read_group):
            require_label(path, label, names)
            columns = [x for x in names if x in label.columns]
            for number in range(count):
                group, rows = read_group(number, columns), list[Sample]()
                for place, fields in enumerate(group.to_pylist() or [{}] * group.num_rows):
                    key = str(fields.get(KEY, f"{os.path.basename(path)}/{row}"))
                    text = label.text(fields, f"{path}, row {row}")
                    rows.append(Sample(key, number, place, text))
                    row += 1
                yield rows

    def fetch(self, path: str, places: Iterable[tuple[int, int]], fields: Sequence[str]) -> None:
        with self.opened(path) as (names, _, read_group):
            for number in {offset for offset, _ in places}:
                read_group(number, [x for x in (*fields, KEY) if x in names])

    def read(
        self, path: str, offset: int, length: int, fields: Sequence[str], *, units: int
    ) -> dict[str, Any]:
        key, groups = (path, offset, tuple(fields)), _KEPT[os.path.dirname(path)]
        if key not in groups:
            with self.opened(path) as (names, _, read_group):
                for field in fields:
                    require_column(path, field, names)
                groups[key] = read_group(offset, [x for x in (*fields, KEY) if x in names])
            # Offsets of a damaged file may point beyond the buffer
            groups[key].validate(full=True)
        groups.move_to_end(key)
        while len(groups) > units:
            groups.popitem(last=False)
        (row,) = groups[key].slice(length, 1).to_pylist()
        content = {x: content_of(y) for x, y in row.items()}
        return {KEY: f"row {length} of group {offset}", **content}


@final
class Parquet(_Tables):
    """Unpacks a row group at once."""

    @contextmanager
    def opened(self, path: str) -> Generator[_Opened]:
        with storage.open(path) as opened, parquet.ParquetFile(opened) as file:
            read = partial(file.read_row_group, use_threads=False)
            yield file.schema_arrow.names, file.num_row_groups, read


@final
class Arrow(_Tables):
    """Maps record batches of a stream or a file on the disk, without a copy."""

    @contextmanager
    def opened(self, path: str) -> Generator[_Opened]:
        batches = _batches.__wrapped__ if storage.is_remote(path) else _batches
        names, count, batch = batches(path)
        yield names, count, lambda number, columns: batch(number).select(columns)


@lru_cache(maxsize=64)
def _batches(path: str) -> tuple[list[str], int, Callable[[int], Any]]:
    file = storage.open(path) if storage.is_remote(path) else pa.memory_map(path)
    try:
        opened = pa.ipc.open_stream(file)
        batches = [*opened]
        return opened.schema.names, len(batches), batches.__getitem__
    # Hugging Face's library writes streams; other programs write files, which end in a footer
    except pa.ArrowInvalid:
        opened = pa.ipc.open_file(file)
        return opened.schema.names, opened.num_record_batches, opened.get_batch
