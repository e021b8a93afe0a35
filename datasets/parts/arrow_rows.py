"""Reads rows written by Hugging Face's library `datasets` with pyarrow alone.

The library is not needed, and no code of a data set is run.
"""

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
    """Read the pyarrow tables of all splits, and each split's features.

    Args:
        root: A folder that `save_to_disk` wrote, a `.arrow` or `.parquet` file, a folder of such
            files (`split_files` assigns them to splits), or the name of a data set in the library's
            cache.
        columns: The requested columns, by the setting that names each.

    Returns:
        The tables by split, with the requested columns; and by split the features by column, as the
            library wrote them.

    Raises:
        DataError: There is no data set, a file is damaged or lacks a column, or files of one split
            number the classes of a column differently.
        ConfigError: pyarrow is not installed.
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
    table_by_split, features = dict[str, Any](), dict[str, dict[str, Any]]()
    for split, files in files_by_split(_place(root)).items():
        parts = [_read(file, columns) for file in files]
        try:
            table_by_split[split] = pa.concat_tables(parts)
        except pa.ArrowInvalid as error:
            raise DataError(
                Problem(
                    str(files[0].parent),
                    f"its files do not have the same columns: {first_line(error)}",
                )
            ) from None
        features_by_file = [_features(part.schema.metadata or {}) for part in parts]
        for column in dict.fromkeys(columns.values()):
            class_lists = {
                file: names
                for file, features_of_file in zip(files, features_by_file, strict=True)
                if (names := class_names(features_of_file.get(column))) is not None
            }
            first_file = next(iter(class_lists), None)
            if other_file := next(
                (
                    file
                    for file in class_lists
                    if first_file and class_lists[file] != class_lists[first_file]
                ),
                None,
            ):
                raise DataError(
                    Problem(
                        str(other_file),
                        f"numbers the classes of {column} differently from "
                        f"{first_file.name if first_file else ''}, a file of the same split",
                        class_lists[other_file][:20],
                        str(class_lists[first_file][:20] if first_file else ""),
                    )
                )
        features[split] = next(filter(None, features_by_file), {})
    return table_by_split, features


def class_names(feature: Any) -> list[Any] | None:
    """Return a ClassLabel's names, numbered from 0; None for other features."""
    names = (
        feature.get("names")
        if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel"
        else None
    )
    return names if isinstance(names, list) else None


def state_of_files(root: str) -> tuple[tuple[str, int, int], ...]:
    """Return (path, size, modification time) of each file of `tables`, to detect changes."""
    files = [file for x in files_by_split(_place(root)).values() for file in x]
    return tuple(
        (str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files
    )


def _place(root: str) -> Path:
    """Return the folder or file of a root; for a name, its only version in the cache."""
    path = Path(root).expanduser()
    if path.exists():
        return path
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()
    # The library replaces "/" in names by three underscores; its map and filter write cache-*.arrow
    folder = cache / root.replace("/", "___")
    versions = (
        sorted(
            {
                file.parent
                for file in folder.glob("**/*.arrow")
                if not file.name.startswith("cache-")
            }
        )
        if root.count("/") <= 1
        else []
    )
    if len(versions) == 1:
        return versions[0]
    if versions:
        raise DataError(
            Problem(
                "dataset.root",
                f"{len(versions)} versions or configurations of it are in the cache",
                root,
                ", ".join(map(str, versions[:5])),
                f"dataset.root={versions[0]}",
            )
        )
    raise DataError(
        Problem(
            "dataset.root",
            "does not exist, and is not in the cache of `datasets`",
            root,
            EXPECTED,
            "on a machine with a network, run once: "
            f"datasets.load_dataset('{root}').save_to_disk('data'), then dataset.root=data",
        )
    )


def _read(file: Path, columns: Mapping[str, str]) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        require_regular(file, into_memory=False)
        if file.suffix == ".parquet":
            with parquet.ParquetFile(file) as opened:
                _require(columns, opened.schema_arrow.names, file)
                ROWS.check(file, opened.metadata.num_rows)
                names = list(dict.fromkeys(columns.values()))
                return _table(
                    opened.iter_batches(_rows_at_once(opened.metadata), columns=names),
                    opened.schema_arrow,
                    names,
                    file,
                )
        # The library writes streams; other programs write files, which end in a footer
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
    """Return a number of rows that fits into the byte limit."""
    # A value may repeat in each row but be stored once: each row is assumed to unpack to the
    # largest column chunk.
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
    """Join the requested columns of all batches, within the limits."""
    import pyarrow as pa

    parts, rows, size = list[Any](), 0, 0
    for batch in batches:
        rows += batch.num_rows
        ROWS.check(file, rows)
        selection = batch.select(columns)
        # Repeated or missing values are stored once, so the file's size does not limit their
        # unpacked size.
        size += sum(map(_unpacked_bytes, selection.columns))
        BYTES.check(file, size)
        # Offsets of a damaged file may point beyond the buffer
        selection.validate(full=True)
        parts.append(selection)
    return pa.Table.from_batches(
        parts, pa.schema([schema.field(name) for name in columns], schema.metadata)
    )


def _unpacked_bytes(column: Any) -> int:
    """Return a column's size in bytes if each row stores its own value."""
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
        DataError.raise_if(
            column not in names,
            f"dataset.{setting}",
            f"{file.name} has no such column",
            column,
            ", ".join(names),
            nearest(column, names) or f"set dataset.{setting} to the column's name",
        )


def _features(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the features in the schema's metadata, such as the class names of a ClassLabel."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}
