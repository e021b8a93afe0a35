"""Interface of a format of shards: the samples of a shard, and the fields of one."""

import abc
import io
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from PIL import ExifTags, Image, UnidentifiedImageError

from samewise.runner.errors import DataError, Problem, did_you_mean
from samewise.runner.shards import storage

KEY = "__key__"
"""The field with a sample's key, as in WebDataset."""
PLAN = "conversion.json"
"""File above the splits' folders: what the shards were made from, and the names of the classes."""
CLASS = "cls"
"""The field with a sample's class, as in WebDataset."""
_CHOICES = (
    ({"objects"}, "shard_boxes", "shard_boxes"),
    ({"image", "jpg", "jpeg", "png", "webp"}, "shards", "shards"),
    ({"audio", "wav", "flac", "mp3", "ogg", "opus"}, "shard_utterances", "shard_recordings"),
    ({"text", "txt"}, "shard_documents", "shard_texts"),
)
"""Fields, and the choices of `dataset` for samples with one of them: without and with a label."""
_CATEGORY = ("category", "category_id", "categories")
"""Fields of an object, one of which has its category."""


class Sample(NamedTuple):
    """A sample as the scan of its shard finds it."""

    key: str
    offset: int
    length: int
    label: str


class Label(NamedTuple):
    """Kind of what the index notes of each sample: a number, a text, or the objects in an image.

    Args:
        name: The field that has it; empty: samples have none.
        image: If the field has objects, the field with the image, or the ending of a member.
    """

    name: str
    image: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a table that may have it, or the sample's key."""
        extra = (self.image,) if self.image else (CLASS,) if self.name == "label" else ()
        return (self.name, "json", *extra, KEY) if self.name else (KEY,)

    @property
    def options(self) -> str:
        """The options of `samewise data` that name it."""
        name = "" if self.name == "label" else f" --label={self.name}"
        return name + (f" --image={self.image}" if self.image else "")

    def text(self, fields: Mapping[str, Any], where: str) -> str:
        """Return the label among a sample's fields as a text.

        It is the field of that name, else one of the object in the field `json`; if the name is
        `label`, else the field `cls`. Objects are a list, or lists side by side in an object as in
        Hugging Face's columns. Their text is JSON: the image's height, width and EXIF orientation, and the objects
        with `bbox`, `category` as a text, and, if they have them, `area` and `iscrowd`.

        Raises:
            DataError: There is none, or several.
        """
        if not self.name:
            return ""
        described = _unpacked(fields.get("json")) or {}
        value = fields.get(
            self.name,
            described.get(self.name, fields.get(CLASS) if self.name == "label" else None),
        )
        if self.image:
            return json.dumps([*_size(fields, self.image, where), _objects(value, where)])
        # Other bytes than a text's, such as an image's, stay bytes
        with suppress(UnicodeDecodeError):
            value = value.decode().strip() if isinstance(value, bytes) else value
        if not isinstance(value, int | str) or value == "":
            raise DataError(
                Problem(
                    where,
                    f"has no single label {self.name!r}",
                    value,
                    "a number or a text",
                    choice_hint({*fields, *described})
                    or "dataset.label=NAME names the column, the member or the field of .json",
                )
            )
        return str(value)


class Reader(abc.ABC):
    """A format. Its methods raise a ValueError for a damaged shard."""

    @abc.abstractmethod
    def scan(self, path: str, label: Label) -> Iterator[Sequence[Sample]]:
        """Yield the samples of each unit of a shard, in order.

        A unit is what is read at once: the whole shard, or a row group of it.

        Args:
            path: The shard.
            label: What to note of each sample.
        """

    def fetch(self, path: str, places: Iterable[tuple[int, int]], fields: Sequence[str]) -> None:
        """Bring what `read` needs of some samples from an object store to the local disk.

        Args:
            path: The shard.
            places: Offset and length of each.
            fields: The requested fields.
        """
        for offset, length in places:
            storage.read(path, offset, length)

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


def content_of(value: Any) -> Any:
    """Return a field's value; of Hugging Face's columns of files the content, without the path."""
    return value.get("bytes") if isinstance(value, Mapping) else value


def _unpacked(value: Any) -> Any:
    return json.loads(value) if isinstance(value, bytes | str) and value else value


def _size(fields: Mapping[str, Any], name: str, where: str) -> tuple[int, int, int]:
    """Return the height and width of a sample's image in pixels, and its EXIF orientation."""
    if name not in fields:
        name = next((x for x in fields if f".{x}" in Image.registered_extensions()), "")
    try:
        with Image.open(io.BytesIO(content_of(fields.get(name)))) as image:
            # Pillow would decode a whole PNG to look for an orientation
            exif = image.getexif() if image.format == "JPEG" else {}
            return image.height, image.width, exif.get(ExifTags.Base.Orientation, 1)
    except (TypeError, SyntaxError, struct.error, UnidentifiedImageError):
        hint = "dataset.image=NAME names the column, or the member's ending"
        raise DataError(Problem(where, "has no image", sorted(fields), hint=hint)) from None


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    value = _unpacked(value)
    if isinstance(value, Mapping) and "bbox" in value:
        value = [dict(zip(value, x, strict=True)) for x in zip(*value.values(), strict=True)]
    if not isinstance(value, list) or not all(
        isinstance(x, Mapping) and x.get("bbox") and _category(x) is not None for x in value
    ):
        raise DataError(
            Problem(
                where,
                "has no list of objects",
                value,
                "objects with bbox and category, or lists of bbox and of category",
                "dataset.objects=NAME names the column, the member or the field of .json",
            )
        )
    return [
        {x: item[x] for x in ("bbox", "area", "iscrowd") if item.get(x) is not None}
        | {"category": str(_category(item))}
        for item in value
    ]


def _category(item: Mapping[str, Any]) -> Any:
    return next((item[x] for x in _CATEGORY if item.get(x) is not None), None)


def require_label(path: str, label: Label, names: Collection[str]) -> None:
    """Raise a DataError unless a table may have the label in one of its columns."""
    if label.name and not ({*label.columns} - {label.image, KEY}) & {*names}:
        require_column(path, label.name, names)
    if label.image:
        require_column(path, label.image, names)


def require_column(path: str, name: str, names: Collection[str]) -> None:
    """Raise a DataError that shows the nearest name unless a table has the column."""
    if name not in names:
        raise DataError(
            Problem(
                path,
                "has no column of this name",
                name,
                expected=", ".join(names),
                hint=did_you_mean(name, names) or choice_hint(names),
            )
        )


def choice_for(names: Collection[str]) -> str:
    """Return the choice of `dataset` that reads samples with fields of these names."""
    has_label = "label" in names or CLASS in names
    return next((x[has_label] for fields, *x in _CHOICES if not fields.isdisjoint(names)), "shards")


def choice_hint(names: Collection[str]) -> str:
    """Return a hint for `dataset=shards`; empty if another choice would not help."""
    choice = choice_for(names)
    return "" if choice == "shards" else f"dataset={choice} dataset.root=FOLDER reads such samples"
