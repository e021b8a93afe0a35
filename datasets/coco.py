"""COCO instances, and other data sets in the same format: one JSON file and a folder of images.

Source: Lin et al. 2014, Microsoft COCO: Common Objects in Context, arXiv 1405.0312.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, final

from samewise.datasets.parts.annotated_images import Annotated, AnnotatedImages, Cache, Masks
from samewise.datasets.parts.classes import object_names, require_count, require_known
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.lists import read_text
from samewise.datasets.parts.masks import encode_annotation
from samewise.datasets.parts.names import relative_names, require_distinct
from samewise.runner.errors import DataError, Problem, first_few, nearest, number_of

# Annotation tools round: up to this distance a box is cut off, beyond it the annotation is wrong
_ROUNDING = 1.001
"""Pixels by which a box may reach beyond its image."""
_MOST = 1e9
"""Pixels, more than an image's side has."""
_WHOLE = "a whole number below 2**63"


@final
class COCO(AnnotatedImages):
    """Images with the boxes of a COCO annotation file.

    All annotations are checked at the start, so that errors show before training.

    As in torchvision's references/detection, boxes are cut at the image's border, and boxes that
    then have no area are left out; in training so are crowds, and images without a box.

    `category_ids` holds the file's number of each label: 0 for the background, -1 for a class that
    the file lacks. It is empty if the labels are these numbers.

    Args:
        root: The folder that `images` and `annotations` are relative to.
        images: The folder of images.
        annotations: The JSON file.
        category_ids: "keep": labels are COCO's category numbers, 1 to 90 with gaps, as in
            torchvision (91 with the background). "dense": labels number the categories from 1 in
            the order of their numbers.
        classes_from: The file whose categories number the labels, usually the training split's;
            `annotations` may lack some of them. None: `annotations`.
        classes: Category names in the order of their labels from 1, or from 0 with `background`
            first. Categories then take the labels of their names, whatever their numbers, and some
            may be missing. None: by `category_ids` and `classes_from`.
        num_classes: The expected number of labels, with the background; None allows any number.
        training: Leave out crowds, and images without a box.
        split: "train", "valid" or "test", if one file has the annotations of all splits; None: all
            images.
        shares: Shares of `valid` and `test`, parts of 1: a hash of its file's name decides each
            image's split (`parts.keyed_split`).
        key: The hash's key: another key splits differently.
        size: [height, width] in pixels, to which images are resized as they are read; None keeps
            their size.
        cache: "memory" keeps all images, decoded.
        masks: As in `AnnotatedImages`: by the annotations' polygons and run lengths.
        unlisted: "drop" leaves out objects of categories that are not among `classes`; "refuse":
            such a category is an error.
        least_area: In training, images whose objects have at most this area altogether, in square
            pixels, are left out.

    Raises:
        DataError: A file is missing or damaged, or an annotation is impossible; it names the file
            and the annotation.
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
        masks: Masks = "none",
        unlisted: Literal["refuse", "drop"] = "refuse",
        least_area: float = 0.0,
    ) -> None:
        base = Path(root).expanduser()
        path = base / annotations
        content = _read(path)
        class_list = None if classes is None else ["background", *object_names(classes)]
        names = _categories(
            content["categories"], path, keep=category_ids == "keep" and class_list is None
        )
        if classes_from is not None and class_list is None:
            names = _numbering(names, path, base / classes_from, keep=category_ids == "keep")
        if unlisted == "drop":
            names = {x: name for x, name in names.items() if name in (class_list or ())}
            content["annotations"] = [
                x
                for x in content["annotations"]
                if not isinstance(x, dict) or _id(x.get("category_id")) in names
            ]
        labels = {
            number: number if category_ids == "keep" else place
            # Label 0 is the background
            for place, number in enumerate(sorted(names), start=1)
        }
        if class_list is not None:
            labels = _labels_by_name(names, labels, class_list, path)
        count = max(labels.values(), default=0) + 1 if class_list is None else len(class_list)
        if category_ids == "dense" or (num_classes is not None and count > num_classes):
            own_names = (
                [names[number] for number in sorted(names)]
                if class_list is None
                else class_list[1:]
            )
            require_count(str(path), own_names, num_classes, labels=count)
        label_names = class_list or [
            "background",
            *(f"(unused {label})" for label in range(1, max(count, num_classes or 0))),
        ]
        for number, label in labels.items():
            label_names[label] = names[number]
        images_by_id = _images(content["images"], base / images, path)
        add_objects(content["annotations"], images_by_id, labels, path, masks=masks != "none")
        chosen = [images_by_id[number] for number in sorted(images_by_id)]
        empty = len(content["annotations"]) - sum(len(x.boxes) for x in chosen)
        self.left_out = f"{number_of(empty, 'object')} with a box of no area" if empty else ""
        if split is not None:
            selected = set(
                select_split([x.name for x in chosen], split, shares, key=key, where=str(path))
            )
            chosen = [x for x in chosen if x.name in selected]
        if training and least_area:
            chosen = [x for x in chosen if sum(x.areas) > least_area]
        # If several categories have one label, the first of them counts
        numbers = {label: number for number, label in reversed(labels.items())}
        last = max(count, num_classes or 0)
        self.category_ids = (
            [0, *(numbers.get(label, -1) for label in range(1, last))]
            if category_ids == "dense" or class_list is not None
            else []
        )
        super().__init__(
            base / images,
            chosen,
            classes=label_names,
            training=training,
            size=size,
            cache=cache,
            masks=masks,
        )


def add_objects(
    entries: list[Any],
    images: dict[int, Annotated],
    labels: dict[int, int],
    path: Path | str,
    *,
    masks: bool,
) -> None:
    """Add annotations to their images.

    Args:
        entries: Objects with image_id, category_id, bbox, and optionally area and iscrowd.
        images: Images by image_id.
        labels: Labels by category_id.
        path: The annotations' place, for errors.
        masks: Whether to add the objects' masks, by their segmentation.

    Raises:
        DataError: An annotation is impossible; it is named.
    """
    for place, annotation in enumerate(entries):
        try:
            _add(annotation, images, labels, masks=masks)
        except DataError as error:
            number = annotation.get("id") if isinstance(annotation, dict) else None
            where = (
                f"{path}, annotation {number}"
                if isinstance(number, int | str)
                else f"{path}, annotations[{place}]"
            )
            raise DataError(*(replace(problem, path=where) for problem in error.problems)) from None


def _add(
    annotation: Any, images: dict[int, Annotated], labels: dict[int, int], *, masks: bool
) -> None:
    """Add an annotation to its image; a DataError has no place yet."""
    if not isinstance(annotation, dict):
        raise DataError(
            Problem(
                "",
                "is not an annotation",
                annotation,
                "an object with image_id, category_id and bbox [x, y, width, height]",
            )
        )
    entries = ("image_id", "category_id", "bbox")
    if missing := [entry for entry in entries if annotation.get(entry) is None]:
        raise DataError(
            Problem(
                "",
                f"is incomplete: it has no {', '.join(missing)}",
                expected="image_id, category_id and bbox [x, y, width, height]",
            )
        )
    image, category = _id(annotation["image_id"]), _id(annotation["category_id"])
    box, area, crowd = annotation["bbox"], annotation.get("area"), annotation.get("iscrowd")
    for entry, number in (("image_id", image), ("category_id", category)):
        if number is None:
            raise DataError(Problem("", f"{entry} is not valid", annotation[entry], _WHOLE))
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
    x, y, width, height = _numbers(box)
    size, segmentation = (images[image].height, images[image].width), annotation.get("segmentation")
    images[image].add(
        [x, y, x + width, y + height],
        labels[category],
        crowd=bool(crowd),
        # Some programs write negative areas
        area=None if area is None else abs(area),
        mask=encode_annotation(segmentation, *size) if masks else b"",
        empty="drop",
        slack=_ROUNDING,
        hint="COCO's boxes are [x, y, width, height], not [x1, y1, x2, y2]; correct the annotation"
        if min(x, y) >= 0
        else "correct the annotation",
    )


def _id(value: Any) -> int | None:
    """Return an id, as programs write it: 7, 7.0 or "7"; None if it is no id."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    is_same = not isinstance(value, bool) and (isinstance(value, str) or number == value)
    return number if is_same and abs(number) < 1 << 63 else None


def _numbers(box: Any) -> list[float]:
    """Return a box's four numbers.

    Raises:
        DataError: The box is impossible.
    """
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
        raise DataError(
            Problem(
                "",
                "has an impossible box",
                box,
                "[x, y, width, height] in pixels, the width and height not negative",
                "correct the annotation",
            )
        )
    return numbers


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        file_names = (
            [str(file.name) for file in path.parent.glob("*.json")] if path.parent.is_dir() else []
        )
        raise DataError(
            Problem(
                str(path),
                f"the annotations cannot be read: {error.strerror}",
                hint=nearest(path.name, file_names)
                or "dataset.annotations names it, below dataset.root"
                if isinstance(error, FileNotFoundError)
                else "",
            )
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(Problem(str(path), f"is not JSON, or is cut short: {error}")) from None
    for key in ("images", "annotations", "categories"):
        DataError.raise_if(
            not isinstance(content, dict) or not isinstance(content.get(key), list),
            str(path),
            f"has no list of {key}",
            expected="COCO's format for instances: images, annotations, categories",
        )
    return content


# COCO's own training file has 450 MB, and each other split needs its categories
_known: dict[tuple[str, int, int], dict[int, str]] = {}
"""Categories of files that were read, by name, time and size."""


def _stamp(path: Path) -> tuple[str, int, int]:
    facts = path.stat()
    return os.path.realpath(path), facts.st_mtime_ns, facts.st_size


def _numbering(names: dict[int, str], path: Path, training: Path, *, keep: bool) -> dict[int, str]:
    """Return the categories that number a file's labels like the training file's.

    Raises:
        DataError: The file has categories that the training file lacks.
    """
    training_names = (_known.get(_stamp(training)) if training.is_file() else None) or _categories(
        _read(training)["categories"], training, keep=keep
    )
    if not keep and [names[number] for number in sorted(names)] == [
        training_names[number] for number in sorted(training_names)
    ]:
        # The ids may differ; the labels are the same
        return names
    unknown = [
        f"{number}: {name}"
        for number, name in sorted(names.items())
        if training_names.get(number) != name
    ]
    if unknown:
        listed = [f"{number}: {name}" for number, name in sorted(training_names.items())]
        raise DataError(
            Problem(
                str(path),
                "has categories that the training split does not have",
                unknown,
                f"some of those in {training.name}, with the same ids: {first_few(listed, 20)}",
            )
        )
    return names if keep else training_names


def _labels_by_name(
    names: Mapping[int, str], labels: Mapping[int, int], classes: Sequence[str], path: Path
) -> dict[int, int]:
    """Return each category's label by its name: its own label if that has this name.

    Raises:
        DataError: A category's name is not among the classes.
    """
    require_known(
        str(path),
        ((f"category {number}", name) for number, name in sorted(names.items())),
        classes[1:],
    )
    return {
        number: label
        if [names[number]] == classes[label : label + 1]
        else classes.index(names[number], 1)
        for number, label in labels.items()
    }


def _categories(entries: list[Any], path: Path, *, keep: bool) -> dict[int, str]:
    listed = [
        (
            _required_id(x, "id", path, kind="a category"),
            str(_required(x, "name", path, "a category")),
        )
        for x in entries
    ]
    _require_unique([number for number, _ in listed], path, kind="categories")
    names = dict(listed)
    require_distinct(str(path), names.values(), what="category")
    lowest = min(names, default=1)
    DataError.raise_if(
        keep and lowest < 1,
        str(path),
        "has a category below 1, but label 0 is the background",
        lowest,
        hint="set dataset.category_ids=dense",
    )
    _known[_stamp(path)] = names
    return names


def _images(entries: list[Any], folder: Path, path: Path) -> dict[int, Annotated]:
    listed = [
        Annotated(
            str(_required(x, "file_name", path, "an image")),
            *(_required_id(x, key, path, kind="an image") for key in ("width", "height", "id")),
        )
        for x in entries
    ]
    _require_unique([image.number for image in listed], path, kind="images")
    names = relative_names(folder, [image.name for image in listed], where=str(path))
    return {
        image.number: replace(image, name=name) for image, name in zip(listed, names, strict=True)
    }


def _required(entry: Any, key: str, path: Path, kind: str) -> Any:
    if not isinstance(entry, dict) or entry.get(key) is None:
        raise DataError(Problem(str(path), f"{kind} is incomplete: it has no {key}", entry))
    return entry[key]


def _required_id(entry: Any, key: str, path: Path, *, kind: str) -> int:
    if (number := _id(value := _required(entry, key, path, kind))) is None:
        raise DataError(Problem(str(path), f"{kind}'s {key} is not valid", value, _WHOLE))
    return number


def _require_unique(numbers: list[int], path: Path, *, kind: str) -> None:
    for number, uses in Counter(numbers).items():
        if uses > 1:
            raise DataError(
                Problem(
                    str(path),
                    f"has {uses} {kind} with the same id",
                    number,
                    hint=f"give each an id of its own, and correct the annotations of {number}",
                )
            )
