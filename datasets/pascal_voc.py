"""Images with boxes annotated as in Pascal VOC (Everingham et al. 2010): in its layout (JPEGImages,
Annotations, ImageSets/Main), or without lists.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.annotated_images import (
    Annotated,
    AnnotatedImages,
    Cache,
    EmptyBoxes,
    check_box,
    check_labels,
    object_names,
)
from samewise.datasets.parts.image_files import EXTENSIONS, list_images
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.limits import read_text, require_regular
from samewise.runner.errors import ConfigError, DataError, Problem, first_few, nearest


@dataclass(frozen=True)
class _Object:
    name: str
    box: list[float]
    difficult: bool


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
        first_pixel: int = 0,
        empty_boxes: EmptyBoxes = "refuse",
        difficult: bool = True,
        size: Sequence[int] | None = None,
        cache: Cache = "none",
    ) -> None:
        if first_pixel not in (0, 1) or empty_boxes not in ("refuse", "drop"):
            message, value = (
                ("first_pixel is 0 or 1", first_pixel)
                if first_pixel not in (0, 1)
                else ("empty_boxes is refuse or drop", empty_boxes)
            )
            raise ConfigError(Problem("dataset", message, value))
        base = Path(root).expanduser()
        images_at, annotations_at = base / images_dir, base / annotations_dir
        files = (
            _match_annotations(images_at, annotations_at, drop=unannotated == "drop")
            if shares is not None
            else {}
        )
        ids = (
            _read_list(base, split)
            if shares is None
            else select_split(list(files), split, shares, key=key, where=str(annotations_at))
        )
        found_in = _classes(annotations_at, files) if classes is None else {}
        names = object_names(classes) if classes is not None else list(found_in)
        check_labels(
            len(names) + 1, num_classes, where=str(annotations_at), names=names, files=found_in
        )
        labels = {name: label for label, name in enumerate(names, start=1)}
        images: list[Annotated] = []
        for number, one in enumerate(ids):
            path = annotations_at / f"{one}.xml"
            image, objects = _parse_annotation(path, one, number, file=files.get(one))
            for found in objects:
                if found.name not in labels:
                    later = (
                        _parse_annotation(annotations_at / f"{other}.xml", other, 0)[1]
                        for other in ids[number:]
                    )
                    unknown = list(
                        dict.fromkeys(
                            [
                                found.name,
                                *(
                                    one.name
                                    for some in later
                                    for one in some
                                    if one.name not in labels
                                ),
                            ]
                        )
                    )
                    words = "has an object of an unknown class" + (
                        f", one of {len(unknown)}" if len(unknown) > 1 else ""
                    )
                    raise DataError(
                        Problem(
                            str(path),
                            words,
                            first_few(unknown, 10),
                            ", ".join(names),
                            nearest(found.name, names),
                        )
                    )
                hint = (
                    "correct the annotation"
                    if min(found.box) < 0
                    else "these corners count from 0: set dataset.first_pixel=0"
                )
                shifted = [
                    found.box[0] - first_pixel,
                    found.box[1] - first_pixel,
                    found.box[2],
                    found.box[3],
                ]
                box = check_box(
                    shifted,
                    where=str(path),
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


def _read_list(base: Path, split: str) -> list[str]:
    path = base / "ImageSets" / "Main" / f"{split}.txt"
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        known = sorted(one.stem for one in path.parent.glob("*.txt"))
        hint = (
            nearest(split, known)
            or "set dataset.root=FOLDER, the one with JPEGImages, Annotations and ImageSets; "
            "without lists, dataset=voc_folder"
        )
        raise DataError(
            Problem(
                str(path),
                f"the list of images cannot be read: {error.strerror}",
                expected=", ".join(known),
                hint=hint,
            )
        ) from None
    ids = [line.split()[0] for line in lines if line.strip()]
    if not ids:
        raise DataError(Problem(str(path), "lists no images"))
    return ids


def _set(missing: Path, key: str, endings: Sequence[str]) -> str:
    """The hint: the folder beside the missing one that contains such files, if there is one."""
    beside = (
        sorted(one for one in missing.parent.iterdir() if one.is_dir())
        if missing.parent.is_dir()
        else []
    )
    fitting = next((one.name for one in beside if list_images(one, extensions=endings)), None)
    return (
        f"set dataset.{key}={fitting}"
        if fitting
        else f"set dataset.root=FOLDER, and dataset.{key} to the folder's name in it"
    )


def _match_annotations(images: Path, annotations: Path, *, drop: bool) -> dict[str, str]:
    """Match sorted names without extensions to image files, each of which has an XML file."""
    kinds = (
        (images, "images", "images_dir", EXTENSIONS),
        (annotations, "annotations", "annotations_dir", (".xml",)),
    )
    missing = [
        Problem(str(folder), f"is not a folder of {what}", hint=_set(folder, key, endings))
        for folder, what, key, endings in kinds
        if not folder.is_dir()
    ]
    if missing:
        raise DataError(*missing)
    found: dict[str, str] = {}
    for name in list_images(images):
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
        str(Path(name).with_suffix("")) for name in list_images(annotations, extensions=(".xml",))
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


def _classes(annotations: Path, known: Mapping[str, str]) -> dict[str, list[str]]:
    """The classes of all annotations, so that every split numbers them alike: sorted, each with the
    file of each of its objects.
    """
    found: dict[str, list[str]] = {}
    for number, path in enumerate(
        [annotations / f"{name}.xml" for name in known] or sorted(annotations.glob("*.xml"))
    ):
        for one in _parse_annotation(path, path.stem, number)[1]:
            found.setdefault(one.name, []).append(path.name)
    if not found:
        raise DataError(
            Problem(str(annotations), "has no annotated objects", hint="set dataset.root=FOLDER")
        )
    return dict(sorted(found.items()))


def _parse_annotation(
    path: Path, name: str, number: int, *, file: str | None = None
) -> tuple[Annotated, list[_Object]]:
    """Parse an XML file: its image (this file's, or the one that it names), and its objects."""
    try:
        require_regular(path)
        tree = ElementTree.parse(path).getroot()
    except OSError as error:
        reason = f"the annotation of image {name} cannot be read: {error.strerror}"
        raise DataError(
            Problem(
                str(path),
                reason,
                hint="write it (without objects, if there are none), or remove the image from "
                "the list",
            )
        ) from None
    except (
        ElementTree.ParseError,
        LookupError,
        ValueError,
    ) as error:  # the latter two of an encoding that there is not
        raise DataError(Problem(str(path), f"is not XML: {error}")) from None
    sides = [_number(tree, f"size/{side}", path) for side in ("width", "height")]
    if not all(1 <= side < math.inf for side in sides):
        raise DataError(
            Problem(str(path), "says that the image has no pixels", f"{sides[0]:g} x {sides[1]:g}")
        )
    width, height = map(int, sides)
    said = (tree.findtext("filename") or "").strip()
    file = file or (
        said if Path(said).stem == name and said.lower().endswith(EXTENSIONS) else f"{name}.jpg"
    )
    image = Annotated(file, width, height, number)
    objects = [
        _Object(
            (one.findtext("name") or "").strip(),
            [_number(one, f"bndbox/{side}", path) for side in ("xmin", "ymin", "xmax", "ymax")],
            (one.findtext("difficult") or "0").strip() == "1",
        )
        for one in tree.iter("object")
    ]
    return image, objects


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
