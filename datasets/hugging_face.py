"""Data sets of Hugging Face: images or recordings in one column, their classes in another."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, final

import torch

from samewise.datasets.parts.arrow_rows import class_names, state_of_files, tables
from samewise.datasets.parts.classes import require_count, require_known, sort_classes
from samewise.datasets.parts.contents import CONTENTS, spaced_indices
from samewise.datasets.parts.decode import Mode
from samewise.datasets.parts.encoded_samples import EncodedSamples, ImageSamples, RecordingSamples
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.names import require_distinct
from samewise.runner.errors import DataError, Problem

_HASHED = dict[Any, list[str]]()
"""Digests of one data set's rows, by the state of its files and the column."""


class _Rows(EncodedSamples):
    """Rows of a split, each with encoded bytes and a label.

    If the data set has the split's own rows, the split is these. Otherwise a hash of the column
    `id`, or else of the bytes, takes rows for `valid` and `test` from the rows for training: adding
    rows moves no other row to another split.

    Args:
        root: A folder by `save_to_disk`, `.arrow` or `.parquet` files, or a name in the library's
            cache (`parts.arrow_rows`).
        split: "train", "valid" or "test".
        content: The setting and the name of the column of images or recordings.
        label: The column of the classes: numbers of a ClassLabel, other whole numbers, or texts.
        id: The column whose hash splits the rows, such as a patient or speaker whose rows stay
            together; None: the bytes.
        shares: Shares of `valid` and `test`, parts of 1, by hash.
        key: The hash's key: another key splits differently.
        classes: Class names in the order of their numbers; None: the ClassLabel's, else all that
            occur, sorted.
        num_classes: The expected number of classes; None allows any number.

    Raises:
        DataError: The data set does not exist, is damaged, lacks a column, has a row without bytes
            or with several labels, or has other classes.
        ConfigError: pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        content: tuple[str, str],
        label: str = "label",
        id: str | None = None,
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
    ) -> None:
        columns = {content[0]: content[1], "label": label, **({"id": id} if id else {})}
        table_by_split, features = tables(root, columns)
        DataError.raise_if(
            "train" not in table_by_split and split not in table_by_split,
            root,
            "has no split for training",
            sorted(table_by_split),
            "train",
        )
        labels = {name: table.column(label).to_pylist() for name, table in table_by_split.items()}
        _require_single(labels, label, root)
        # A test split that is published without labels cannot be measured: it is left empty
        if "test" in table_by_split and {*labels["test"]} in ({-1}, {None}):
            table_by_split["test"], labels["test"] = table_by_split["test"].slice(0, 0), []
        self.root, (self._setting, self._column) = root, content
        self._table = table_by_split[split if split in table_by_split else "train"]
        places = list(range(self._table.num_rows))
        # A split with rows of its own takes none from training
        own_shares = {x: share for x, share in shares.items() if x not in table_by_split}
        if split not in table_by_split or (split == "train" and any(own_shares.values())):
            ids = self._table.column(id).to_pylist() if id else []
            if None in ids:
                raise DataError(
                    Problem(
                        f"{root}, row {ids.index(None)}",
                        f"has no {id}",
                        expected="an id, since rows of one id are kept in one split",
                    )
                )
            # Rows with the same bytes belong to one split
            texts = [str(x) for x in ids] if id else self._digests()
            chosen = set(
                select_split(list(dict.fromkeys(texts)), split, own_shares, key=key, where=root)
            )
            places = [place for place in places if texts[place] in chosen]
        self._places = places
        self.classes, numbers = _number_classes(
            labels,
            {name: class_names(x.get(label)) for name, x in features.items()},
            classes,
            root,
        )
        require_count(root, self.classes, num_classes)
        split_numbers = numbers[split if split in table_by_split else "train"]
        self.labels = torch.tensor([split_numbers[place] for place in places], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._places)

    def content(self, index: int) -> tuple[bytes, str, str]:
        return self._read_encoded(self._places[index]), self.root, f"row {self._places[index]}"

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def _digests(self) -> list[str]:
        """Return the digest of each row's bytes."""
        # Cached for the next split, which reads the same files
        key = (state_of_files(self.root), self._column)
        if key not in _HASHED:
            _HASHED.clear()
            _HASHED[key] = [
                blake2b(self._read_encoded(place), digest_size=16).hexdigest()
                for place in range(self._table.num_rows)
            ]
        return _HASHED[key]

    def _read_encoded(self, place: int) -> bytes:
        value = self._table.column(self._column)[place].as_py()
        raw = value.get("bytes") if isinstance(value, dict) else value
        if isinstance(raw, bytes):
            return raw
        if isinstance(value.get("path") if isinstance(value, dict) else value, str):
            actual, hint = (
                "a path, not the content",
                "save_to_disk also writes the content; for files named in a table, use "
                "dataset=table",
            )
        elif value in (None, {"bytes": None, "path": None}):
            actual, hint = (
                "nothing",
                f"leave such rows out, with filter(lambda row: row['{self._column}'] is "
                "not None) of `datasets`",
            )
        else:
            actual, hint = (
                type(value).__name__,
                f"dataset.{self._setting}=COLUMN names another column; those of type "
                "Image() or Audio() have a file in each row",
            )
        raise DataError(
            Problem(
                f"{self.root}, row {place}",
                f"column {self._column} holds {actual}",
                expected="an encoded image or recording",
                hint=hint,
            )
        )

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover classes, labels, positions, and the bytes of 64 samples.

        They do not depend on where the data are.
        """
        digest = blake2b(
            repr((self.classes, self.labels.tolist(), self._places)).encode(), digest_size=16
        )
        for index in spaced_indices(len(self), CONTENTS):
            digest.update(self.content(index)[0])
        return digest.hexdigest()


@final
class HuggingFaceImages(ImageSamples, _Rows):
    """Samples `{"image": uint8[C, H, W], "label": int}` of a Hugging Face data set.

    Args:
        image: The column of the images.
        mode: "rgb" (C is 3) or "gray" (C is 1).
        upright: Turn images by their EXIF orientation, as the library does.
        transform: Applied to each image, in the worker.
        root, split, label, id, shares, key, classes, num_classes: As in `_Rows`.

    Raises:
        DataError: As in `_Rows`; or an image is damaged.
        ConfigError: pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        image: str = "image",
        mode: Mode = "rgb",
        upright: bool = False,
        transform: Transform | None = None,
        label: str = "label",
        id: str | None = None,
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
    ) -> None:
        self.mode, self.upright, self.transform = mode, upright, transform
        super().__init__(
            root=root,
            split=split,
            content=("image", image),
            label=label,
            id=id,
            shares=shares,
            key=key,
            classes=classes,
            num_classes=num_classes,
        )


@final
class HuggingFaceRecordings(RecordingSamples, _Rows):
    """Samples `{"waveform": float32[T], "length": int, "label": int, "name": str}`.

    All samples have length T; `length` excludes the silence at the end.

    Args:
        audio: The column of the recordings.
        seconds: Length of a sample in seconds. A longer recording is cut: in training to a section
            that the sample's own stream draws, else to the middle.
        sample_rate: The waveforms' rate in Hz; recordings at another rate are resampled.
        root, split, label, id, shares, key, classes, num_classes: As in `_Rows`.

    Raises:
        DataError: As in `_Rows`; or a recording is damaged.
        ConfigError: pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        audio: str = "audio",
        seconds: float,
        sample_rate: int,
        label: str = "label",
        id: str | None = None,
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
    ) -> None:
        self.sample_rate, self.frames, self.is_training = (
            sample_rate,
            max(1, round(seconds * sample_rate)),
            split == "train",
        )
        super().__init__(
            root=root,
            split=split,
            content=("audio", audio),
            label=label,
            id=id,
            shares=shares,
            key=key,
            classes=classes,
            num_classes=num_classes,
        )


def _require_single(labels: Mapping[str, list[Any]], column: str, root: str) -> None:
    """Raise a DataError unless each label is a number or a text."""
    for split, values in labels.items():
        if (
            place := next(
                (place for place, x in enumerate(values) if isinstance(x, list | dict | bytes)),
                None,
            )
        ) is not None:
            raise DataError(
                Problem(
                    f"{root}, {split}, row {place}",
                    f"column {column} holds {type(values[place]).__name__}",
                    values[place],
                    "a number or a text",
                    "dataset.label=COLUMN names another column, with a single label in each row",
                )
            )


def _number_classes(
    labels: Mapping[str, list[Any]],
    names: Mapping[str, list[Any] | None],
    classes: Sequence[str] | None,
    root: str,
) -> tuple[list[str], dict[str, list[int]]]:
    """Return the classes, and by split each row's class number."""
    # NaN, which programs write for missing values, differs from itself
    DataError.raise_if(
        any(x is None or x != x for values in labels.values() for x in values),
        root,
        "has a row without a label",
        hint="dataset.label=COLUMN names the column",
    )
    for class_list in filter(None, names.values()):
        require_distinct(root, map(str, class_list), what="class")
    numbering = names.get("train") or next(filter(None, names.values()), [])
    # A split's numbers refer to its own ClassLabel, which may differ from training's
    texts = {
        split: [_class_name(x, names.get(split) or numbering) for x in values]
        for split, values in labels.items()
    }
    all_classes = list(map(str, classes or numbering)) or sort_classes(
        x for values in texts.values() for x in values
    )
    number = {name: place for place, name in enumerate(all_classes)}
    for split, values in texts.items():
        rows = ((f"row {place}", name) for place, name in enumerate(values))
        require_known(f"{root}, {split}", rows, all_classes)
    return all_classes, {split: [number[x] for x in values] for split, values in texts.items()}


def _class_name(label: Any, names: Sequence[Any]) -> str:
    """Return a row's class; no name if the label is not one of the names' numbers."""
    if not names or not isinstance(label, int):
        return str(label)
    # A class may be called 2
    return str(names[label]) if 0 <= label < len(names) else f"number {label}"
