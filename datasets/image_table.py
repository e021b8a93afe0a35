"""Images and labels listed in a table: CSV, JSON, JSON lines or Parquet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.classes import require_count, require_known, sort_classes
from samewise.datasets.parts.image_files import Cache, DecodedBy, ImageFiles, ImageMode
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.lists import read_rows
from samewise.datasets.parts.names import relative_names, require_listed
from samewise.datasets.parts.split_files import MEANINGS
from samewise.runner.errors import DataError, Problem, nearest, number_of

_KNOWN = ("train", "valid", "test", "unused")


@final
class ImageTable(ImageFiles):
    """Samples `{"image": uint8[C, H, W], "label": int}` of the images in a table.

    Labels number the classes in sorted order: by number if all are numbers.

    Args:
        table_path: The table; pyarrow, a dependency of MLflow, reads .parquet.
        split: "train", "valid" or "test".
        root: The folder that the images' names are relative to; None: the table's folder.
        image: The column of the images' files.
        label: The column of their classes.
        split_column: The column that says "train", "valid" or "test" (or "val", "validation", ...),
            or "unused"; None: a hash of each image's name decides.
        shares: Shares of `valid` and `test`, parts of 1, by hash (`parts.keyed_split`).
        key: The hash's key: another key splits differently.
        classes: Class names in the order of their numbers; None: all that occur in any split.
        num_classes: The expected number of classes; None allows any number.
        mode, channels, cache, decode, transform: As in `ImageFiles`.

    Raises:
        DataError: The table cannot be read or lacks a column, an image is missing, or a class is
            unknown.
        ConfigError: The table is a Parquet file, and pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        table_path: str,
        split: Literal["train", "valid", "test"],
        root: str | None = None,
        image: str = "image",
        label: str = "label",
        split_column: str | None = None,
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        mode: ImageMode = "rgb",
        channels: int | None = None,
        cache: Cache = "none",
        decode: DecodedBy = "worker",
        transform: Transform | None = None,
    ) -> None:
        path = Path(table_path).expanduser()
        folder = Path(root).expanduser() if root is not None else path.parent
        columns = [image, label, *([split_column] if split_column else [])]
        rows = read_rows(path, columns, item="image", setting="dataset.table_path")
        listed = [row.text(image, setting="image") for row in rows]
        names = relative_names(folder, listed, where=str(path))
        labels = {
            name: row.text(label, setting="label") for name, row in zip(names, rows, strict=True)
        }
        class_list = (
            list(map(str, classes)) if classes is not None else sort_classes(labels.values())
        )
        require_known(str(path), labels.items(), class_list)
        files = dict[str, list[str]]()
        for name, class_name in labels.items():
            files.setdefault(class_name, []).append(name)
        require_count(str(path), class_list, num_classes, files=files if classes is None else {})
        if split_column:
            splits = [row.text(split_column, setting="split_column") for row in rows]
            split_of_name = dict(zip(names, map(_split_named, splits), strict=True))
            if unknown_splits := Counter(
                split for split in splits if _split_named(split) not in _KNOWN
            ):
                ((split_name, count),) = unknown_splits.most_common(1)
                hint = (
                    nearest(split_name, _KNOWN)
                    or 'write "unused" for rows that no split should have'
                )
                where, reason = (
                    f"{path}, column {split_column}",
                    f"names a split that does not exist, in {number_of(count, 'row')}",
                )
                raise DataError(Problem(where, reason, split_name, ", ".join(_KNOWN), hint))
            chosen = [name for name in names if split_of_name[name] == split]
            # A data set may lack a test split
            if not chosen and split != "test":
                raise DataError(
                    Problem(
                        str(path),
                        f"has no image for the split {split}",
                        sorted(set(split_of_name.values())),
                        "train, valid and test",
                    )
                )
        else:
            chosen = select_split(names, split, shares, key=key, where=str(path))
        require_listed(folder, chosen, listed_in=path.name)
        number = {name: place for place, name in enumerate(class_list)}
        chosen_labels = [number[labels[name]] for name in chosen]
        super().__init__(
            folder,
            chosen,
            chosen_labels,
            classes=class_list,
            mode=mode,
            channels=channels,
            cache=cache,
            decode=decode,
            transform=transform,
        )


def _split_named(value: str) -> str:
    text = value.strip().lower()
    return MEANINGS.get(text, text)
