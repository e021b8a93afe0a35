"""Images and labels listed in a table: CSV, JSON, JSON lines or Parquet."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, final

from torch import Tensor

from samewise.datasets.parts.classes import require_count, require_known, sort_classes
from samewise.datasets.parts.image_files import Cache, DecodedBy, ImageFiles, ImageMode
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.lists import numbers_in, read_rows
from samewise.datasets.parts.names import relative_names, require_listed
from samewise.datasets.parts.table_splits import select_rows


@final
class ImageTable(ImageFiles):
    """Samples `{"image": uint8[C, H, W], "label": int}` of the images in a table.

    Labels number the classes in sorted order: by number if all are numbers.

    Args:
        table_path: The table; pyarrow, a dependency of MLflow, reads .parquet.
        split: "train", "valid" or "test".
        root: The folder that the images' names are relative to; None: the table's folder.
        image: The column of the images' files.
        label: The column of their classes; or a list of columns with numbers, to learn by
            recipe=regression: a label is then float32[T], and `classes` are the columns.
        split_column: The column that says "train", "valid" or "test" (or "val", "validation", ...),
            or "unused"; None: a hash of each image's name decides.
        shares: Shares of `valid` and `test`, parts of 1, by hash (`parts.keyed_split`).
        key: The hash's key: another key splits differently.
        classes: Class names in the order of their numbers; None: all that occur in any split.
        num_classes: The expected number of classes; None allows any number.
        weight: The column of the images' weights, which becomes the attribute `weights`, for
            `order=weighted`; None: there are none.
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
        label: str | Sequence[str] = "label",
        split_column: str | None = None,
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        weight: str | None = None,
        mode: ImageMode = "rgb",
        channels: int | None = None,
        cache: Cache = "none",
        decode: DecodedBy = "worker",
        transform: Transform | None = None,
    ) -> None:
        path = Path(table_path).expanduser()
        folder = Path(root).expanduser() if root is not None else path.parent
        columns = [
            image,
            *([label] if isinstance(label, str) else label),
            *filter(None, [split_column, weight]),
        ]
        rows = read_rows(path, columns, item="image", setting="dataset.table_path")
        names = relative_names(
            folder, [row.text(image, setting="image") for row in rows], where=str(path)
        )
        chosen = select_rows(
            rows, names, split, split_column=split_column, shares=shares, key=key, item="image"
        )
        require_listed(folder, chosen, listed_in=path.name)
        place_of = {name: place for place, name in enumerate(names)}
        places = [place_of[name] for name in chosen]
        if weight:
            self.weights = numbers_in(rows, [weight], setting="weight")[places, 0]
        if isinstance(label, str):
            texts = {
                name: row.text(label, setting="label")
                for name, row in zip(names, rows, strict=True)
            }
            class_list = (
                list(map(str, classes)) if classes is not None else sort_classes(texts.values())
            )
            require_known(str(path), texts.items(), class_list)
            require_count(str(path), class_list, num_classes)
            number = {name: place for place, name in enumerate(class_list)}
            labels: Sequence[int] | Tensor = [number[texts[name]] for name in chosen]
        else:
            class_list = list(label)
            require_count(str(path), class_list, num_classes)
            labels = numbers_in(rows, class_list, setting="label")[places]
        super().__init__(
            folder,
            chosen,
            labels,
            classes=class_list,
            mode=mode,
            channels=channels,
            cache=cache,
            decode=decode,
            transform=transform,
        )
