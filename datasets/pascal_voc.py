"""Images with boxes annotated as in Pascal VOC (Everingham et al. 2010): in its layout (JPEGImages,
Annotations, ImageSets/Main), or without lists.
"""

from __future__ import annotations

import math
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.annotated_images import (
    Annotated,
    AnnotatedImages,
    Cache,
    EmptyBoxes,
    check_box,
)
from samewise.datasets.parts.classes import object_names, require_count, require_known
from samewise.datasets.parts.folders import ANNOTATIONS, IMAGES, list_files
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.limits import read_bytes
from samewise.datasets.parts.lists import read_lines
from samewise.datasets.parts.names import first_repeated, require_listed
from samewise.runner.errors import DataError, Problem, nearest

_ANSWERS = {"": False, "0": False, "1": True} | {"no": False, "yes": True}
_ANSWERS |= {"false": False, "true": True}
_DECLARED = re.compile(rb"\s*<\?xml[^>]*?encoding\s*=\s*[\"']([\w.-]+)")


@dataclass(frozen=True)
class _Object:
    name: str
    box: list[float]
    difficult: bool


@dataclass(frozen=True)
class _Annotation:
    """An XML file: its image by the name it gives, the image's size in pixels, and its objects."""

    file: str
    width: int
    height: int
    objects: list[_Object]


@final
class PascalVOC(AnnotatedImages):
    """The images in `ImageSets/Main/SPLIT.txt`, or a keyed share of all, with the boxes in their
    XML files.

    Every annotation is looked at here, so its faults are told before training.

    Args:
        root: The folder that holds JPEGImages, Annotations and ImageSets; the two folders below are
            relative to it.
        split: The list: "train", "val", "trainval", "test". With `shares`: "train", "valid" or
            "test".
        images_dir, annotations_dir: The folders of images and of XML files; the same one will do.
        shares: Of `valid` and `test`, where there are no lists: each image's split is decided by a
            hash of its name (`parts.keyed_split`). An image and its XML file then have the same
            name but for the ending, also in folders below. None: by the lists.
        key: Of the hash: another key splits otherwise.
        unannotated: What to do, without lists, with images that have no XML file: "refuse", or
            "drop".
        classes: The names that are objects, in the order of their labels from 1, perhaps after
            `background`; None: all that occur in any annotation, sorted.
        num_classes: How many there should be, with the background.
        training: Without images that have no box.
        first_pixel: The number of the first pixel: 1 in VOC's own files, whose boxes include their
            last pixel; 0: corners are taken as they are.
        empty_boxes: What to do with a box without area: "refuse", or "drop".
        difficult: Whether objects marked as difficult count. Otherwise they are left out of
            training, and in evaluation a detection of one counts neither way, as in VOC's own
            measure: by the rule for COCO's crowds, by which a detection belongs to an object if
            more than the threshold of it lies inside.
        size: [height, width] that images are resized to as they are read.
        cache: "memory" keeps all images, decoded.

    Raises: DataError: a file is missing or damaged, a box is impossible or a class unknown; it
        names the file.
    """

    def __init__(
        self,
        *,
        root: str,
        split: str,
        images_dir: str = "JPEGImages",
        annotations_dir: str = "Annotations",
        shares: Mapping[str, float] | None = None,
        key: str = "",
        unannotated: Literal["refuse", "drop"] = "refuse",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        training: bool = False,
        first_pixel: Literal[0, 1] = 0,
        empty_boxes: EmptyBoxes = "refuse",
        difficult: bool = True,
        size: Sequence[int] | None = None,
        cache: Cache = "none",
    ) -> None:
        base = Path(root).expanduser()
        images_at, annotations_at = base / images_dir, base / annotations_dir
        files = (
            _match_annotations(images_at, annotations_at, drop=unannotated == "drop")
            if shares is not None
            else {}
        )
        ids = (
            _read_list(base, split, annotations_at)
            if shares is None
            else select_split(list(files), split, shares, key=key, where=str(annotations_at))
        )
        parse = lru_cache(maxsize=None)(partial(_parse_annotation, annotations_at))
        found_in = {} if classes is not None else _classes(annotations_at, list(files), parse)
        names = object_names(classes) if classes is not None else list(found_in)
        require_count(
            str(annotations_at), names, num_classes, labels=len(names) + 1, files=found_in
        )
        objects = ((f"{name}.xml", found.name) for name in ids for found in parse(name).objects)
        require_known(str(annotations_at), objects, names)
        labels = {name: label for label, name in enumerate(names, start=1)}
        images: list[Annotated] = []
        for number, name in enumerate(ids):
            annotation = parse(name)
            image = Annotated(
                files.get(name) or annotation.file, annotation.width, annotation.height, number
            )
            for found in annotation.objects:
                x1, y1, x2, y2 = found.box
                hint = (
                    "correct the annotation"
                    if min(found.box) < 0
                    else "these corners count from 0: set dataset.first_pixel=0"
                )
                box = check_box(
                    [x1 - first_pixel, y1 - first_pixel, x2, y2],
                    where=str(annotations_at / f"{name}.xml"),
                    width=image.width,
                    height=image.height,
                    empty=empty_boxes,
                    hint=hint,
                )
                if box is not None:
                    image.add(box, labels[found.name], crowd=found.difficult and not difficult)
            images.append(image)
        super().__init__(
            images_at,
            images,
            classes=["background", *names],
            training=training,
            size=size,
            cache=cache,
        )


def _read_list(base: Path, split: str, annotations: Path) -> list[str]:
    path = base / "ImageSets" / "Main" / f"{split}.txt"
    try:
        lines = [line.strip() for line in read_lines(path)]
    except OSError as error:
        known = sorted(other.stem for other in path.parent.glob("*.txt"))
        hint = (
            nearest(split, known)
            or "set dataset.root=FOLDER, the one with JPEGImages, Annotations and ImageSets; "
            "without lists, dataset=voc_folder"
        )
        reason = f"the list of images cannot be read: {error.strerror}"
        raise DataError(Problem(str(path), reason, expected=", ".join(known), hint=hint)) from None
    # In the lists of a class, 1, 0 or -1 follows a name, which may have spaces itself
    ids = [
        line if (annotations / f"{line}.xml").is_file() else re.sub(r"\s+(-1|0|1)$", "", line)
        for line in lines
    ]
    if not ids:
        raise DataError(Problem(str(path), "lists no images"))
    if (twice := first_repeated(ids)) is not None:
        raise DataError(Problem(str(path), "lists an image twice", twice, "a line for each image"))
    require_listed(annotations, [f"{name}.xml" for name in ids], listed_in=path.name)
    return ids


def _set(missing: Path, key: str, endings: Sequence[str]) -> str:
    """The hint: the folder beside the missing one that contains such files, if there is one."""
    beside = (
        sorted(one for one in missing.parent.iterdir() if one.is_dir())
        if missing.parent.is_dir()
        else []
    )
    fitting = next((one.name for one in beside if list_files(one, endings).names), None)
    return (
        f"set dataset.{key}={fitting}"
        if fitting
        else f"set dataset.root=FOLDER, and dataset.{key} to the folder's name in it"
    )


def _match_annotations(images: Path, annotations: Path, *, drop: bool) -> dict[str, str]:
    """Match sorted names without extensions to image files, each of which has an XML file."""
    kinds = (
        (images, "images", "images_dir", IMAGES),
        (annotations, "annotations", "annotations_dir", ANNOTATIONS),
    )
    missing = [
        Problem(str(folder), f"is not a folder of {what}", hint=_set(folder, key, endings))
        for folder, what, key, endings in kinds
        if not folder.is_dir()
    ]
    if missing:
        raise DataError(*missing)
    found: dict[str, str] = {}
    for name in list_files(images, IMAGES).names:
        other = found.setdefault(str(Path(name).with_suffix("")), name)
        if other != name:
            raise DataError(
                Problem(
                    str(images / name),
                    f"and {other} have the same annotation",
                    hint="rename one, and its annotation",
                )
            )
    described = {
        str(Path(name).with_suffix("")) for name in list_files(annotations, ANNOTATIONS).names
    }
    for bare, name in sorted({bare: f"{bare}.jpg" for bare in described - found.keys()}.items()):
        raise DataError(
            Problem(
                str(annotations / f"{bare}.xml"),
                f"has no image {name} (or .png, ...) in {images}",
                hint="add it, or remove the annotation",
            )
        )
    bare_images = sorted(found.keys() - described)
    if bare_images and not drop:
        reason = (
            f"has no annotation {bare_images[0]}.xml in {annotations}, one of "
            f"{len(bare_images)} such images"
        )
        hint = "write it (without objects, if there are none), or set dataset.unannotated=drop"
        raise DataError(Problem(str(images / found[bare_images[0]]), reason, hint=hint))
    if not described:
        raise DataError(
            Problem(
                str(annotations),
                "has no annotations",
                expected="an XML file for each image",
                hint="set dataset.root=FOLDER",
            )
        )
    return {bare: found[bare] for bare in sorted(described)}


def _classes(
    annotations: Path, ids: Sequence[str], parse: Callable[[str], _Annotation]
) -> dict[str, list[str]]:
    """The classes of all annotations, so that every split numbers them alike: sorted, each with the
    file of each of its objects.
    """
    found: dict[str, list[str]] = {}
    flat = [name for name in list_files(annotations, ANNOTATIONS).names if "/" not in name]
    for name in ids or [file.removesuffix(".xml") for file in flat]:
        for thing in parse(name).objects:
            found.setdefault(thing.name, []).append(f"{os.path.basename(name)}.xml")
    if not found:
        raise DataError(
            Problem(str(annotations), "has no annotated objects", hint="set dataset.root=FOLDER")
        )
    return dict(sorted(found.items()))


def _parse_annotation(folder: Path, name: str) -> _Annotation:
    """Parse an XML file of an image."""
    path = folder / f"{name}.xml"
    try:
        tree = _parse_xml(read_bytes(path))
    except OSError as error:
        raise DataError(Problem(str(path), f"cannot be read: {error.strerror}")) from None
    # The latter two of an encoding that does not exist, or that the file does not have
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise DataError(Problem(str(path), f"is not XML: {error}")) from None
    sides = [_number(tree, f"size/{side}", path) for side in ("width", "height")]
    if not all(1 <= side < math.inf for side in sides):
        raise DataError(
            Problem(str(path), "says that the image has no pixels", f"{sides[0]:g} x {sides[1]:g}")
        )
    said = (tree.findtext("filename") or "").strip()
    file = said if Path(said).stem == name and said.lower().endswith(IMAGES) else f"{name}.jpg"
    objects = [_parse_object(node, path) for node in tree.iter("object")]
    return _Annotation(file, int(sides[0]), int(sides[1]), objects)


def _parse_xml(raw: bytes) -> ElementTree.Element:
    """Parse XML in the encoding that it declares: expat itself knows none of several bytes a
    letter but Unicode's.
    """
    try:
        return ElementTree.fromstring(raw)
    except ValueError:
        if not (declared := _DECLARED.match(raw)):
            raise
        return ElementTree.fromstring(raw.decode(declared[1].decode()))


def _parse_object(node: ElementTree.Element, path: Path) -> _Object:
    name = (node.findtext("name") or "").strip()
    if not name:
        raise DataError(Problem(str(path), "has an object without a name", hint="name its class"))
    if (count := len(node.findall("bndbox"))) != 1:
        hint = "write an object for each box"
        raise DataError(Problem(str(path), f"has an object {name!r} of {count} boxes", hint=hint))
    difficult = (node.findtext("difficult") or "").strip()
    if difficult.lower() not in _ANSWERS:
        reason = "does not say whether an object is difficult"
        raise DataError(Problem(str(path), reason, difficult, "0 or 1"))
    box = [_number(node, f"bndbox/{side}", path) for side in ("xmin", "ymin", "xmax", "ymax")]
    return _Object(name, box, _ANSWERS[difficult.lower()])


def _number(node: ElementTree.Element, where: str, path: Path) -> float:
    text = node.findtext(where)
    try:
        return float(text or "")
    except ValueError:
        raise DataError(
            Problem(
                str(path), f"has no number at {where}", text, "an annotation in Pascal VOC's format"
            )
        ) from None
