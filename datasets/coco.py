"""COCO's instances (Lin et al. 2014, arXiv 1405.0312), and other data sets in the same format: one
JSON file and a folder of images.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

from samewise.datasets.parts.annotated_images import Annotated, AnnotatedImages, Cache
from samewise.datasets.parts.classes import object_names, require_count
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.limits import read_bytes
from samewise.datasets.parts.names import first_repeated, require_distinct
from samewise.runner.errors import DataError, Problem, first_few, nearest

_ROUNDING = 1.0
"""Pixels by which a box may reach out of its image: what annotation tools leave by rounding is cut
off, anything further is a mistake."""
_MOST = 1e9
"""Pixels: more than an image's side has."""
_WHOLE = "a whole number below 2**63"


@final
class COCO(AnnotatedImages):
    """Images with the boxes of a COCO annotation file.

    All annotations are checked here, so that errors show before training.

    As torchvision's references/detection have it, boxes are cut at the image's border, those that
    then have no area are left out, and in training so are crowds and images that have no box left.

    `category_ids` are the file's numbers of the labels, the background's 0 first, and -1 for a
    class that the file lacks; empty if labels are these numbers.

    Args:
        root: The folder that the other two are relative to.
        images: The folder of images.
        annotations: The JSON file.
        category_ids: "keep": labels are COCO's category numbers, 1 to 90, with gaps (torchvision's;
            91 with the background). "dense": the categories are numbered from 1 in the order of
            their numbers.
        classes_from: The file whose categories number the labels (the training split's), of which
            `annotations` may have some; None: `annotations`.
        classes: The categories' names in the order of their labels from 1, or from 0 with
            `background` first: categories then have the labels of their names, whatever their
            numbers, and some may be missing. None: by `category_ids` and `classes_from`.
        num_classes: How many labels there should be, with the background.
        training: Without crowds and without images that have no box.
        split: "train", "valid" or "test", where one file has the annotations of all; None: all
            images.
        shares: Of `valid` and `test`: each image's split is decided by a hash of its file's name
            (`parts.keyed_split`).
        key: Of the hash: another key splits otherwise.
        size: [height, width] that images are resized to as they are read.
        cache: "memory" keeps all images, decoded.

    Raises: DataError: a file is missing or damaged, or an annotation is impossible; it names the
        file and the annotation.
    """

    def __init__(
        self,
        *,
        root: str,
        images: str,
        annotations: str,
        category_ids: Literal["keep", "dense"] = "keep",
        classes_from: str | None = None,
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        training: bool = False,
        split: Literal["train", "valid", "test"] | None = None,
        shares: Mapping[str, float] = MappingProxyType({}),
        key: str = "",
        size: Sequence[int] | None = None,
        cache: Cache = "none",
    ) -> None:
        base = Path(root).expanduser()
        path = base / annotations
        content = _read(path)
        given = None if classes is None else ["background", *object_names(classes)]
        names = _categories(
            content["categories"], path, keep=category_ids == "keep" and given is None
        )
        if classes_from is not None and given is None:
            names = _numbering(names, path, base / classes_from, keep=category_ids == "keep")
        labels = {
            number: number if category_ids == "keep" else place
            for place, number in enumerate(sorted(names), start=1)
        }
        if given is not None:
            labels = _labels_by_name(names, labels, given, path)
        count = max(labels.values(), default=0) + 1 if given is None else len(given)
        if category_ids == "dense" or (num_classes is not None and count > num_classes):
            uses = Counter(
                _id(one["category_id"])
                for one in content["annotations"]
                if isinstance(one, dict) and _id(one.get("category_id")) is not None
            )
            files = {name: [f"category {number}"] * uses[number] for number, name in names.items()}
            own = [names[number] for number in sorted(names)] if given is None else given[1:]
            require_count(str(path), own, num_classes, labels=count, files=files)
        known = given or [
            "background",
            *(f"(unused {label})" for label in range(1, max(count, num_classes or 0))),
        ]
        for number, label in labels.items():
            known[label] = names[number]
        found = _images(content["images"], path)
        _add_all(content["annotations"], found, labels, path)
        chosen = [found[number] for number in sorted(found)]
        if split is not None:
            wanted = set(
                select_split([one.name for one in chosen], split, shares, key=key, where=str(path))
            )
            chosen = [one for one in chosen if one.name in wanted]
        numbers = {label: number for number, label in reversed(labels.items())}
        last = max(count, num_classes or 0)
        self.category_ids = (
            [0, *(numbers.get(label, -1) for label in range(1, last))]
            if category_ids == "dense" or given is not None
            else []
        )
        super().__init__(
            base / images, chosen, classes=known, training=training, size=size, cache=cache
        )


def _add_all(
    found: list[Any], images: dict[int, Annotated], labels: dict[int, int], path: Path
) -> None:
    for place, one in enumerate(found):
        try:
            _add(one, images, labels)
        except DataError as error:
            number = one.get("id") if isinstance(one, dict) else None
            where = (
                f"{path}, annotation {number}"
                if isinstance(number, int | str)
                else f"{path}, annotations[{place}]"
            )
            raise DataError(*(replace(problem, path=where) for problem in error.problems)) from None


def _add(one: Any, images: dict[int, Annotated], labels: dict[int, int]) -> None:
    """Add an annotation to its image; a DataError says what is wrong, and not yet where."""
    if not isinstance(one, dict):
        raise DataError(
            Problem(
                "",
                "is not an annotation",
                one,
                "an object with image_id, category_id and bbox [x, y, width, height]",
            )
        )
    entries = ("image_id", "category_id", "bbox")
    if missing := [entry for entry in entries if one.get(entry) is None]:
        reason = f"is incomplete: it has no {', '.join(missing)}"
        expected = "image_id, category_id and bbox [x, y, width, height]"
        raise DataError(Problem("", reason, expected=expected))
    image, category = _id(one["image_id"]), _id(one["category_id"])
    box, area, crowd = one["bbox"], one.get("area"), one.get("iscrowd")
    for entry, number in (("image_id", image), ("category_id", category)):
        if number is None:
            raise DataError(Problem("", f"{entry} is not a whole number", one[entry], _WHOLE))
    if area is not None and not (isinstance(area, int | float) and abs(area) < _MOST**2):
        raise DataError(
            Problem("", "area is not a number", area, "the object's area in square pixels")
        )
    if crowd not in (None, 0, 1):
        raise DataError(
            Problem("", "iscrowd is not 0 or 1", crowd, "0, or 1 for a group of objects")
        )
    if image is None or image not in images:
        raise DataError(Problem("", "belongs to an image that the file does not list", image))
    if category is None or category not in labels:
        raise DataError(
            Problem(
                "",
                "has an unknown category",
                category,
                f"one of the file's {len(labels)} categories",
            )
        )
    held = images[image]
    x, y, width, height = _numbers(box)
    if x < -_ROUNDING or y < -_ROUNDING:
        expected = (
            f"[x, y, width, height] in pixels, x from 0 to {held.width} and y from 0 to "
            f"{held.height}"
        )
        raise DataError(
            Problem("", "has a box with a negative corner", box, expected, "correct the annotation")
        )
    if (
        x + width > held.width + _ROUNDING + 1e-3 or y + height > held.height + _ROUNDING + 1e-3
    ):  # 1e-3: what decimals lose in the sum
        expected = (
            f"[x, y, width, height] in pixels, x + width at most {held.width} and y + height "
            f"at most {held.height}"
        )
        hint = (
            "COCO's boxes are [x, y, width, height], not [x1, y1, x2, y2]; correct the annotation"
        )
        raise DataError(
            Problem(
                "",
                f"has a box that ends beyond the image of {held.width} x {held.height} pixels",
                box,
                expected,
                hint,
            )
        )
    x1, y1, x2, y2 = (
        max(x, 0.0),
        max(y, 0.0),
        min(x + width, float(held.width)),
        min(y + height, float(held.height)),
    )
    if x1 < x2 and y1 < y2:
        held.add(
            [x1, y1, x2, y2],
            labels[category],
            crowd=bool(crowd),
            area=None if area is None else abs(area),
        )


def _id(value: Any) -> int | None:
    """Return an id, as programs write it: 7, 7.0 or "7"; None if it is not one."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    is_same = not isinstance(value, bool) and (isinstance(value, str) or number == value)
    return number if is_same and abs(number) < 1 << 63 else None


def _numbers(box: Any) -> list[float]:
    try:
        numbers = [float(value) for value in box] if isinstance(box, list) else []
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if (
        len(numbers) != 4
        or not all(abs(value) < _MOST for value in numbers)
        or numbers[2] < 0
        or numbers[3] < 0
    ):
        hint = "correct the annotation"
        raise DataError(
            Problem(
                "",
                "has an impossible box",
                box,
                "[x, y, width, height] in pixels, the width and height not negative",
                hint,
            )
        )
    return numbers


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(read_bytes(path))
    except OSError as error:
        near = (
            [str(other.name) for other in path.parent.glob("*.json")]
            if path.parent.is_dir()
            else []
        )
        hint = nearest(path.name, near) or "set dataset.root=FOLDER"
        raise DataError(
            Problem(str(path), f"the annotations cannot be read: {error.strerror}", hint=hint)
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(Problem(str(path), f"is not JSON, or is cut short: {error}")) from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(
                Problem(
                    str(path),
                    f"has no list of {key}",
                    expected="COCO's format for instances: images, annotations, categories",
                )
            )
    return content


_known: dict[tuple[str, int, int], dict[int, str]] = {}
"""The categories of files that were read, by name, time and size: the training file of COCO itself
has 450 MB, and each other split asks for them."""


def _stamp(path: Path) -> tuple[str, int, int]:
    facts = path.stat()
    return os.path.realpath(path), facts.st_mtime_ns, facts.st_size


def _numbering(names: dict[int, str], path: Path, training: Path, *, keep: bool) -> dict[int, str]:
    """The categories that number a file's labels as the training file's are.

    A DataError if the file has some that the training file does not have.
    """
    known = (_known.get(_stamp(training)) if training.is_file() else None) or _categories(
        _read(training)["categories"], training, keep=keep
    )
    if not keep and [names[number] for number in sorted(names)] == [
        known[number] for number in sorted(known)
    ]:
        return names  # perhaps of other ids, but the same labels
    unknown = [
        f"{number}: {name}" for number, name in sorted(names.items()) if known.get(number) != name
    ]
    if unknown:
        expected = (
            f"some of those in {training.name}, with the same ids: "
            f"{first_few([f'{number}: {known[number]}' for number in sorted(known)], 20)}"
        )
        raise DataError(
            Problem(
                str(path), "has categories that the training split does not have", unknown, expected
            )
        )
    return names if keep else known


def _labels_by_name(
    names: Mapping[int, str], labels: Mapping[int, int], classes: Sequence[str], path: Path
) -> dict[int, int]:
    """The label of each category by its name: its own label if that has this name.

    A DataError if there are categories of other names.
    """
    if unknown := [
        f"{number}: {name}" for number, name in sorted(names.items()) if name not in classes[1:]
    ]:
        raise DataError(
            Problem(
                str(path),
                "has categories that are not among the classes",
                unknown,
                f"some of: {first_few(classes[1:], 20)}",
            )
        )
    return {
        number: label
        if [names[number]] == classes[label : label + 1]
        else classes.index(names[number], 1)
        for number, label in labels.items()
    }


def _categories(found: list[Any], path: Path, *, keep: bool) -> dict[int, str]:
    listed = [
        (
            _required_id(one, "id", path, of="a category"),
            str(_required(one, "name", path, "a category")),
        )
        for one in found
    ]
    if not listed:
        raise DataError(Problem(str(path), "has no categories"))
    _require_unique([number for number, _ in listed], path, of="categories")
    names = dict(listed)
    if (twice := first_repeated(names.values())) is not None:
        numbers = [number for number, name in names.items() if name == twice]
        reason = f"has two categories of the name {twice!r}"
        raise DataError(Problem(str(path), reason, numbers, "a name for each category"))
    require_distinct(str(path), names.values(), what="category")
    if keep and min(names) < 1:
        hint = "set dataset.category_ids=dense"
        reason = "has a category below 1, but label 0 is the background"
        raise DataError(Problem(str(path), reason, min(names), hint=hint))
    _known[_stamp(path)] = names
    return names


def _images(found: list[Any], path: Path) -> dict[int, Annotated]:
    listed = [
        Annotated(
            str(_required(one, "file_name", path, "an image")),
            *(_required_id(one, key, path, of="an image") for key in ("width", "height", "id")),
        )
        for one in found
    ]
    _require_unique([image.number for image in listed], path, of="images")
    for image in listed:
        if image.width < 1 or image.height < 1:
            size = f"{image.width} x {image.height}"
            raise DataError(Problem(str(path), f"image {image.number} has no pixels", size))
    if (twice := first_repeated(os.path.normpath(image.name) for image in listed)) is not None:
        reason, hint = "lists an image twice", "join its entries, and the annotations of both"
        raise DataError(Problem(str(path), reason, twice, hint=hint))
    return {image.number: image for image in listed}


def _required(entry: Any, key: str, path: Path, of: str) -> Any:
    if not isinstance(entry, dict) or entry.get(key) is None:
        raise DataError(Problem(str(path), f"{of} is incomplete: it has no {key}", entry))
    return entry[key]


def _required_id(entry: Any, key: str, path: Path, *, of: str) -> int:
    if (number := _id(value := _required(entry, key, path, of))) is None:
        raise DataError(
            Problem(str(path), f"{of} has a {key} that is not a whole number", value, _WHOLE)
        )
    return number


def _require_unique(numbers: list[int], path: Path, *, of: str) -> None:
    for number, uses in Counter(numbers).items():
        if uses > 1:
            hint = f"give each an id of its own, and correct the annotations of {number}"
            raise DataError(
                Problem(str(path), f"has {uses} {of} with the same id", number, hint=hint)
            )
