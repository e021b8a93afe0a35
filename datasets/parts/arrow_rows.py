"""Rows written by Hugging Face's library `datasets`, read by pyarrow alone: the library is not
needed, and no code of a data set is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samewise.datasets.parts.limits import BYTES, ROWS, require_regular
from samewise.datasets.parts.split_files import EXPECTED, files_by_split
from samewise.runner.errors import ConfigError, DataError, Problem, first_line, nearest

_ROWS_AT_ONCE = 64


def tables(
    root: str, columns: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The pyarrow tables by split with the requested columns, and each split's features by column
    as the library wrote them.

    Args:
        root: A folder that `save_to_disk` wrote, a `.arrow` or `.parquet` file, a folder of them
            (`split_files` tells their splits apart), or the name of a data set in the library's
            cache.
        columns: The columns asked for, by the setting that names each.

    Raises: DataError: there are none, one is damaged, or lacks a column; files of one split number
        the classes of a column differently. ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(
            Problem(
                "dataset.root",
                "reading it requires pyarrow, which is not installed",
                hint="pip install pyarrow",
            )
        ) from None
    found, features = dict[str, Any](), dict[str, dict[str, Any]]()
    for split, files in files_by_split(_place(root)).items():
        parts = [_read(file, columns) for file in files]
        try:
            found[split] = pa.concat_tables(parts)
        except pa.ArrowInvalid as error:
            raise DataError(
                Problem(
                    str(files[0].parent),
                    f"its files do not have the same columns: {first_line(error)}",
                )
            ) from None
        of_files = [_features(part.schema.metadata or {}) for part in parts]
        for column in dict.fromkeys(columns.values()):
            named = {
                file: names
                for file, one in zip(files, of_files, strict=True)
                if (names := class_names(one.get(column))) is not None
            }
            first = next(iter(named), None)
            if other := next(
                (file for file in named if first and named[file] != named[first]), None
            ):
                words = (
                    f"numbers the classes of {column} differently from "
                    f"{first.name if first else ''}, a file of the same split"
                )
                raise DataError(
                    Problem(
                        str(other),
                        words,
                        named[other][:20],
                        str(named[first][:20] if first else ""),
                    )
                )
        features[split] = next(filter(None, of_files), {})
    return found, features


def class_names(feature: Any) -> list[Any] | None:
    """The names that a ClassLabel gives to the numbers from 0; None for other features."""
    names = (
        feature.get("names")
        if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel"
        else None
    )
    return names if isinstance(names, list) else None


def state_of_files(root: str) -> tuple[tuple[str, int, int], ...]:
    """(path, size, modification time) of each file that `tables` reads, to detect changes."""
    files = [file for some in files_by_split(_place(root)).values() for file in some]
    return tuple(
        (str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files
    )


def _place(root: str) -> Path:
    """The folder or file; for a name, its only version in the cache."""
    path = Path(root).expanduser()
    if path.exists():
        return path
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()
    named = cache / root.replace("/", "___")
    versions = (
        sorted(
            {file.parent for file in named.glob("**/*.arrow") if not file.name.startswith("cache-")}
        )
        if root.count("/") <= 1
        else []
    )
    if len(versions) == 1:
        return versions[0]
    if versions:
        hint = f"dataset.root={versions[0]}"
        words = f"{len(versions)} versions or configurations of it are in the cache"
        raise DataError(
            Problem("dataset.root", words, root, ", ".join(map(str, versions[:5])), hint)
        )
    hint = (
        "on a machine with a network, run once: "
        f"datasets.load_dataset('{root}').save_to_disk('data'), then dataset.root=data"
    )
    raise DataError(
        Problem(
            "dataset.root",
            "does not exist, and is not in the cache of `datasets`",
            root,
            EXPECTED,
            hint,
        )
    )


def _read(file: Path, columns: Mapping[str, str]) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        require_regular(file, whole=False)
        if file.suffix == ".parquet":
            with parquet.ParquetFile(file) as opened:
                _require(columns, opened.schema_arrow.names, file)
                ROWS.check(file, opened.metadata.num_rows)
                asked = list(dict.fromkeys(columns.values()))
                return _table(
                    opened.iter_batches(_rows_at_once(opened.metadata), columns=asked),
                    opened.schema_arrow,
                    asked,
                    file,
                )
        mapped = pa.memory_map(str(file))
        try:
            opened = pa.ipc.open_stream(mapped)
            batches: Iterable[Any] = opened
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(mapped)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        _require(columns, opened.schema.names, file)
        return _table(batches, opened.schema, list(dict.fromkeys(columns.values())), file)
    except OSError as error:
        raise DataError(
            Problem(
                str(file),
                f"cannot be read: {error.strerror or first_line(error)}",
                expected=EXPECTED,
            )
        ) from None
    except pa.ArrowException as error:
        raise DataError(
            Problem(
                str(file),
                f"is damaged, or contains no table: {first_line(error)}",
                expected=EXPECTED,
            )
        ) from None


def _rows_at_once(metadata: Any) -> int:
    """As many rows as fit into the allowed bytes even if each repeats everything in a group of
    rows.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    largest = max(
        (
            group.column(place).total_uncompressed_size
            for group in groups
            for place in range(group.num_columns)
        ),
        default=0,
    )
    return max(1, min(_ROWS_AT_ONCE, BYTES.most // max(1, largest)))


def _table(batches: Iterable[Any], schema: Any, columns: Sequence[str], file: Path) -> Any:
    """The columns of all batches: repeated or missing values are stored once, so the file's size
    does not limit their unpacked size.
    """
    import pyarrow as pa

    found, rows, size = list[Any](), 0, 0
    for batch in batches:
        rows += batch.num_rows
        ROWS.check(file, rows)
        held = batch.select(columns)
        size += sum(map(_unpacked_bytes, held.columns))
        BYTES.check(file, size)
        held.validate(full=True)  # offsets may lead out of the buffer
        found.append(held)
    return pa.Table.from_batches(
        found, pa.schema([schema.field(name) for name in columns], schema.metadata)
    )


def _unpacked_bytes(column: Any) -> int:
    """The bytes of a column if each row has its own value."""
    from pyarrow import compute, types

    if not hasattr(column, "dictionary"):
        return column.nbytes
    values = column.dictionary
    lengths = (
        compute.binary_length(values)
        if types.is_string(values.type) or types.is_binary(values.type)
        else None
    )
    return (
        (compute.sum(lengths.take(column.indices)).as_py() or 0)
        if lengths is not None
        else values.nbytes * len(column)
    )


def _require(columns: Mapping[str, str], names: Sequence[str], file: Path) -> None:
    for setting, column in columns.items():
        if column not in names:
            hint = nearest(column, names) or f"set dataset.{setting} to the column's name"
            raise DataError(
                Problem(
                    f"dataset.{setting}",
                    f"{file.name} has no such column",
                    column,
                    ", ".join(names),
                    hint,
                )
            )


def _features(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The features in the schema's metadata: for a ClassLabel, the names of the classes."""
    try:
        found = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
