"""Data sets of Hugging Face: images or recordings in one column, and their classes in another."""

from __future__ import annotations

import abc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Literal, final

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from samewise.datasets.parts.arrow_rows import class_names, state_of_files, tables
from samewise.datasets.parts.audio_files import audio_preparation, read_audio
from samewise.datasets.parts.classes import require_count, sort_classes
from samewise.datasets.parts.contents import CONTENTS, spaced_indices
from samewise.datasets.parts.decode import DAMAGED, Mode, decode, image_preparation
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.names import first_repeated
from samewise.datasets.parts.recordings import crop_or_pad
from samewise.datasets.parts.upright import turn_upright
from samewise.runner.errors import DataError, Problem, nearest

_HASHED = dict[Any, list[str]]()
"""The digests of one data set's rows, by the state of its files and the column."""


class _Rows(Dataset[dict[str, Any]], abc.ABC):
    """The rows of a split, each with encoded bytes and a label.

    A split of which the data set has its own rows has those. Where it has none for `valid` or
    `test`, they are taken from its rows for training by a hash of the column `id`, or else of the
    bytes: adding rows moves none of the others to another split.

    Args:
        root: A folder by `save_to_disk`, `.arrow` or `.parquet` files, or a name in the library's
            cache (`parts.arrow_rows`).
        split: "train", "valid" or "test".
        content: The column of the images or recordings.
        label: The column of their classes: numbers of a ClassLabel, other whole numbers, or texts.
        id: The column by whose hash rows are split, as a patient or speaker whose rows stay
            together; None: the bytes.
        shares: Of `valid` and `test`, by hash.
        key: Of the hash: another key splits otherwise.
        classes: The classes in the order of their numbers; None: as the ClassLabel has them, else
            all that occur, sorted.
        num_classes: How many there should be; None: as many as there are.

    Raises: DataError: it is not there, is damaged, lacks a column, or a row has no bytes or several
        labels; there are other classes. ConfigError: pyarrow is not installed.
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
        found, features = tables(root, columns)
        if "train" not in found and split not in found:
            raise DataError(Problem(root, "has no split for training", sorted(found), "train"))
        labels = {name: table.column(label).to_pylist() for name, table in found.items()}
        _require_single(labels, label, root)
        if "test" in found and {*labels["test"]} in (
            {-1},
            {None},
        ):  # published without labels: there is nothing to measure
            found["test"], labels["test"] = found["test"].slice(0, 0), []
        self.root, (self._setting, self._column) = root, content
        self._table = found[split if split in found else "train"]
        places = list(range(self._table.num_rows))
        own = {one: share for one, share in shares.items() if one not in found}
        if split not in found or (split == "train" and any(own.values())):
            given = self._table.column(id).to_pylist() if id else []
            if None in given:
                raise DataError(
                    Problem(
                        f"{root}, row {given.index(None)}",
                        f"has no {id}",
                        expected="an id, since rows of one id are kept in one split",
                    )
                )
            texts = [str(one) for one in given] if id else self._digests()
            chosen = set(select_split(list(dict.fromkeys(texts)), split, own, key=key, where=root))
            places = [at for at in places if texts[at] in chosen]
        self._places = places
        self.classes, numbers = _number_classes(
            labels,
            {name: class_names(one.get(label)) for name, one in features.items()},
            classes,
            root,
        )
        require_count(root, self.classes, num_classes)
        of_split = numbers[split if split in found else "train"]
        self._labels = torch.tensor([of_split[at] for at in places], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._places)

    def name_of(self, index: int) -> str:
        """How messages refer to a sample."""
        return f"{self.root}, row {self._places[index]}"

    def _bytes(self, index: int) -> bytes:
        return self._read_encoded(self._places[index])

    def _digests(self) -> list[str]:
        """The digest of each row's bytes; cached for the next split, which uses the same files."""
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
            of, hint = (
                "a path, not the content",
                "save_to_disk also writes the content; for files named in a table, use "
                "dataset=table",
            )
        elif value in (None, {"bytes": None, "path": None}):
            of, hint = (
                "nothing",
                f"leave such rows out, with filter(lambda row: row['{self._column}'] is "
                "not None) of `datasets`",
            )
        else:
            of, hint = (
                type(value).__name__,
                f"dataset.{self._setting}=COLUMN names another column; those of type "
                "Image() or Audio() have a file in each row",
            )
        raise DataError(
            Problem(
                f"{self.root}, row {place}",
                f"column {self._column} holds {of}",
                expected="an encoded image or recording",
                hint=hint,
            )
        )

    def fingerprint(self) -> str:
        """32 hex digits of the samples: classes, labels, positions, and the bytes of 64.

        Independent of where the data are.
        """
        digest = blake2b(
            repr((self.classes, self._labels.tolist(), self._places)).encode(), digest_size=16
        )
        for index in spaced_indices(len(self), CONTENTS):
            digest.update(self._bytes(index))
        return digest.hexdigest()


@final
class HuggingFaceImages(_Rows):
    """Samples `{"image": uint8[C, H, W], "label": int}`.

    Args:
        image: The column of the images.
        mode: "rgb" (C is 3) or "gray" (C is 1).
        upright: Turn them by their EXIF orientation, as the library does.
        transform: Applied to each image, in the worker.
        root, split, label, id, shares, key, classes, num_classes: As in `_Rows`.
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
        self._mode: Mode = mode
        self._upright = upright
        self._transform = transform
        given: Any = {
            "label": label,
            "id": id,
            "shares": shares,
            "key": key,
            "classes": classes,
            "num_classes": num_classes,
        }
        super().__init__(root=root, split=split, content=("image", image), **given)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            raw = self._bytes(index)
            image: Tensor = decode(raw, mode=self._mode, name=self.name_of(index))
        except (*DAMAGED, Image.DecompressionBombError) as error:
            raise DataError(
                Problem(
                    self.name_of(index), f"is not an image, or is damaged: {type(error).__name__}"
                )
            ) from None
        image = turn_upright(image, raw, self.name_of(index)) if self._upright else image
        return {
            "image": image if self._transform is None else self._transform(image),
            "label": int(self._labels[index]),
        }

    @property
    def preparation(self) -> dict[str, Any]:
        """How a file becomes an image, for those who do it elsewhere."""
        return image_preparation(self._mode, upright=self._upright)


@final
class HuggingFaceRecordings(_Rows):
    """Samples `{"waveform": float32[T], "length": int, "label": int, "name": str}`, all of length
    T; `length` excludes the silence at the end.

    Args:
        audio: The column of the recordings.
        seconds: The length of a sample. Of a longer recording a stretch that is drawn by the
            sample's own stream in training, else the middle.
        sample_rate: In Hz; recordings at another rate are resampled.
        root, split, label, id, shares, key, classes, num_classes: As in `_Rows`.
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
        self.sample_rate, self._frames, self._training = (
            sample_rate,
            max(1, round(seconds * sample_rate)),
            split == "train",
        )
        given: Any = {
            "label": label,
            "id": id,
            "shares": shares,
            "key": key,
            "classes": classes,
            "num_classes": num_classes,
        }
        super().__init__(root=root, split=split, content=("audio", audio), **given)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile(prefix="samewise-") as file:  # the decoders look at files
            file.write(self._bytes(index))
            file.flush()
            try:
                waveform, _ = read_audio(file.name, sample_rate=self.sample_rate)
            except DataError as error:
                raise DataError(
                    *(replace(one, path=self.name_of(index)) for one in error.problems)
                ) from None
        spare = len(waveform) - self._frames
        start = (
            0 if spare <= 0 else int(torch.randint(spare + 1, ())) if self._training else spare // 2
        )
        heard = waveform[start : start + self._frames]
        return {
            "waveform": crop_or_pad(heard, self._frames),
            "length": len(heard),
            "label": int(self._labels[index]),
            "name": f"row {self._places[index]}",
        }

    @property
    def preparation(self) -> dict[str, Any]:
        """How a recording becomes a waveform, for those who do it elsewhere."""
        return audio_preparation(self.sample_rate, frames=self._frames)


def _require_single(labels: Mapping[str, list[Any]], column: str, root: str) -> None:
    for split, some in labels.items():
        if (
            at := next(
                (at for at, one in enumerate(some) if isinstance(one, list | dict | bytes)), None
            )
        ) is not None:
            words = f"column {column} holds {type(some[at]).__name__}"
            hint = "dataset.label=COLUMN names another column, with a single label in each row"
            raise DataError(
                Problem(f"{root}, {split}, row {at}", words, some[at], "a number or a text", hint)
            )


def _number_classes(
    labels: Mapping[str, list[Any]],
    names: Mapping[str, list[Any] | None],
    classes: Sequence[str] | None,
    root: str,
) -> tuple[list[str], dict[str, list[int]]]:
    """The classes, and each row's class number, by split.

    A split's numbers mean the names of its own ClassLabel, which may differ from training's.
    """
    if any(
        one is None or one != one for some in labels.values() for one in some
    ):  # NaN, which programs write for what is missing, differs from itself
        raise DataError(
            Problem(root, "has a row without a label", hint="dataset.label=COLUMN names the column")
        )
    for given in filter(None, names.values()):
        if twice := first_repeated(map(str, given)):
            raise DataError(
                Problem(root, "has two classes of the same name", twice, "a name for each class")
            )
    numbering = names.get("train") or next(filter(None, names.values()), [])
    texts = {
        split: [_class_name(one, names.get(split) or numbering) for one in some]
        for split, some in labels.items()
    }
    known = list(map(str, classes or numbering)) or sort_classes(
        one for some in texts.values() for one in some
    )
    number = {name: place for place, name in enumerate(known)}
    unknown = next(
        ((split, one) for split, some in texts.items() for one in some if one not in number), None
    )
    if unknown is not None:
        split, name = unknown
        raise DataError(
            Problem(
                f"{root}, {split}",
                "has a row of an unknown class",
                name,
                ", ".join(known[:20]),
                nearest(name, known),
            )
        )
    return known, {split: [number[one] for one in some] for split, some in texts.items()}


def _class_name(label: Any, names: Sequence[Any]) -> str:
    return str(names[label]) if isinstance(label, int) and 0 <= label < len(names) else str(label)
