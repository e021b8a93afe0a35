"""Images with boxes annotated as in Pascal VOC.

They lie in its layout (JPEGImages, Annotations, ImageSets/Main), or without lists. Source:
Everingham et al. 2010, The Pascal Visual Object Classes Challenge,
https://doi.org/10.1007/s11263-009-0275-4.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.annotated_images import (
    Annotated,
    AnnotatedImages,
    Cache,
    EmptyBoxes,
)
from samewise.datasets.parts.classes import object_names, require_count, require_known
from samewise.datasets.parts.folders import ANNOTATIONS, IMAGES, list_files
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.limits import read_bytes
from samewise.datasets.parts.lists import read_lines
from samewise.datasets.parts.names import relative_names, require_listed
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
    """Content of an XML file: the image's name and size in pixels, and its objects."""

    path: Path
    file: str
    width: int
    height: int
    objects: list[_Object]


@final
class PascalVOC(AnnotatedImages):
    """Images in `ImageSets/Main/SPLIT.txt`, or a keyed share of all, with boxes from XML files.

    All annotations are checked at the start, so that errors show before training.

    Args:
        root: The folder that holds JPEGImages, Annotations and ImageSets.
        split: The list: "train", "val", "trainval" or "test". With `shares`: "train", "valid" or
            "test".
        images_dir: The folder of images, relative to `root`.
        annotations_dir: The folder of XML files, relative to `root`; it may be the folder of
            images.
        shares: Shares of `valid` and `test`, parts of 1, if there are no lists: a hash of its name
            decides each image's split (`parts.keyed_split`). An image and its XML file then have
            the same name except for the ending, also in folders below. None: by the lists.
        key: The hash's key: another key splits differently.
        unannotated: Without lists, what happens to images that have no XML file: "refuse" or
            "drop".
        classes: Names of objects in the order of their labels from 1, optionally after
            `background`; None: all that occur in any annotation, sorted.
        num_classes: The expected number of labels, with the background; None allows any number.
        training: Leave out images without a box.
        first_pixel: The number of the first pixel. 1: as in VOC's own files, whose boxes include
            their last pixel. 0: corners are taken as they are.
        empty_boxes: What happens to a box without area: "refuse" or "drop".
        difficult: Whether objects marked as difficult count. Otherwise they are left out of
            training, and in evaluation a detection of one counts neither as right nor as wrong, as
            in VOC's own measure. COCO's rule for crowds decides: a detection belongs to an object
            if more than the threshold of the detection lies inside it.
        size: [height, width] in pixels, to which images are resized as they are read; None keeps
            their size.
        cache: "memory" keeps all images, decoded.

    Raises:
        DataError: A file is missing or damaged, a box is impossible, or a class is unknown; it
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
        image_folder, annotation_folder = base / images_dir, base / annotations_dir
        xml_files = _xml_files(annotation_folder)
        files = (
            _match_annotations(
                image_folder, annotation_folder, xml_files, drop=unannotated == "drop"
            )
            if shares is not None
            else {}
        )
        ids = (
            _read_list(base, split, annotation_folder, xml_files)
            if shares is None
            else select_split(list(files), split, shares, key=key, where=str(annotation_folder))
        )
        # A file is used for the classes, for their check and for the boxes
        parse = lru_cache(maxsize=None)(partial(_parse_annotation, annotation_folder, xml_files))
        names = (
            object_names(classes)
            if classes is not None
            # The annotations of all splits count, so that every split numbers the classes alike
            else sorted(
                {
                    item.name
                    for file in list(files) or [x for x in xml_files if "/" not in x]
                    for item in parse(file).objects
                }
            )
        )
        require_count(str(annotation_folder), names, num_classes, labels=len(names) + 1)
        objects = (
            (parse(name).path.name, item.name) for name in ids for item in parse(name).objects
        )
        require_known(str(annotation_folder), objects, names)
        labels = {name: label for label, name in enumerate(names, start=1)}
        images: list[Annotated] = []
        for number, name in enumerate(ids):
            annotation = parse(name)
            image = Annotated(
                files.get(name) or annotation.file, annotation.width, annotation.height, number
            )
            for item in annotation.objects:
                x1, y1, x2, y2 = item.box
                image.add(
                    # VOC's boxes include their last pixel, so only the first corner moves
                    [x1 - first_pixel, y1 - first_pixel, x2, y2],
                    labels[item.name],
                    crowd=item.difficult and not difficult,
                    where=str(annotation.path),
                    empty=empty_boxes,
                    hint="these corners count from 0: set dataset.first_pixel=0"
                    if min(x1, y1) == 0 < first_pixel
                    else "correct the annotation",
                )
            images.append(image)
        super().__init__(
            image_folder,
            images,
            classes=["background", *names],
            training=training,
            size=size,
            cache=cache,
        )


def _xml_files(folder: Path) -> dict[str, str]:
    """Return the XML files in a folder by their names without the ending."""
    names = list_files(folder, ANNOTATIONS).names if folder.is_dir() else []
    return {str(Path(name).with_suffix("")): name for name in names}


def _read_list(
    base: Path, split: str, annotations: Path, xml_files: Mapping[str, str]
) -> list[str]:
    """Return the names in the list of a split."""
    path = base / "ImageSets" / "Main" / f"{split}.txt"
    try:
        lines = [line.strip() for line in read_lines(path)]
    except OSError as error:
        list_names = sorted(x.stem for x in path.parent.glob("*.txt"))
        raise DataError(
            Problem(
                str(path),
                f"the list of images cannot be read: {error.strerror}",
                expected=", ".join(list_names),
                hint=nearest(split, list_names)
                or "set dataset.root=FOLDER, the one with JPEGImages, Annotations and ImageSets; "
                "without lists, dataset=voc_folder",
            )
        ) from None
    # In the lists of a class, 1, 0 or -1 follows a name, which may have spaces itself
    ids = [line if line in xml_files else re.sub(r"\s+(-1|0|1)$", "", line) for line in lines]
    ids = relative_names(annotations, ids, where=str(path))
    require_listed(
        annotations, [xml_files.get(name, f"{name}.xml") for name in ids], listed_in=path.name
    )
    return ids


def _set(missing: Path, key: str, endings: Sequence[str]) -> str:
    """Return a hint that names the missing folder's sibling with such files, if there is one."""
    siblings = (
        sorted(x for x in missing.parent.iterdir() if x.is_dir()) if missing.parent.is_dir() else []
    )
    fitting = next((x.name for x in siblings if list_files(x, endings).names), None)
    return (
        f"set dataset.{key}={fitting}"
        if fitting
        else f"set dataset.root=FOLDER, and dataset.{key} to the folder's name in it"
    )


def _match_annotations(
    images: Path, annotations: Path, annotated: Mapping[str, str], *, drop: bool
) -> dict[str, str]:
    """Match sorted names without endings to image files, each of which has an XML file."""
    kinds = (
        (images, "images", "images_dir", IMAGES),
        (annotations, "annotations", "annotations_dir", ANNOTATIONS),
    )
    DataError.raise_all(
        Problem(str(folder), f"is not a folder of {noun}", hint=_set(folder, key, endings))
        for folder, noun, key, endings in kinds
        if not folder.is_dir()
    )
    image_of_name: dict[str, str] = {}
    for name in list_files(images, IMAGES).names:
        other_name = image_of_name.setdefault(str(Path(name).with_suffix("")), name)
        if other_name != name:
            raise DataError(
                Problem(
                    str(images / name),
                    f"and {other_name} have the same annotation",
                    hint="rename one, and its annotation",
                )
            )
    for bare, name in sorted(
        {bare: f"{bare}.jpg" for bare in annotated.keys() - image_of_name}.items()
    ):
        raise DataError(
            Problem(
                str(annotations / annotated[bare]),
                f"has no image {name} (or .png, ...) in {images}",
                hint="add it, or remove the annotation",
            )
        )
    bare_images = sorted(image_of_name.keys() - annotated)
    if bare_images and not drop:
        raise DataError(
            Problem(
                str(images / image_of_name[bare_images[0]]),
                f"has no annotation {bare_images[0]}.xml in {annotations}, one of "
                f"{len(bare_images)} such images",
                hint="write it (without objects, if there are none), or set "
                "dataset.unannotated=drop",
            )
        )
    DataError.raise_if(
        not annotated,
        str(annotations),
        "has no annotations",
        expected="an XML file for each image",
    )
    return {bare: image_of_name[bare] for bare in sorted(annotated)}


def _parse_annotation(folder: Path, files: Mapping[str, str], name: str) -> _Annotation:
    """Parse an image's XML file."""
    path = folder / files.get(name, f"{name}.xml")
    try:
        tree = _parse_xml(read_bytes(path))
    except OSError as error:
        raise DataError(Problem(str(path), f"cannot be read: {error.strerror}")) from None
    # LookupError: the declared encoding does not exist; ValueError: the file is not in it
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise DataError(Problem(str(path), f"is not XML, or is damaged: {error}")) from None
    sides = [_number(tree, f"size/{side}", path) for side in ("width", "height")]
    if not all(1 <= side < 1 << 63 and side.is_integer() for side in sides):
        raise DataError(
            Problem(
                str(path),
                "gives a size that no image has",
                f"{sides[0]:g} x {sides[1]:g}",
                "whole pixels",
            )
        )
    file_name = (tree.findtext("filename") or "").strip()
    file = (
        file_name
        if Path(file_name).stem == name and file_name.lower().endswith(IMAGES)
        else f"{name}.jpg"
    )
    return _Annotation(
        path,
        file,
        int(sides[0]),
        int(sides[1]),
        [_parse_object(node, path) for node in tree.iter("object")],
    )


def _parse_xml(raw: bytes) -> ElementTree.Element:
    """Parse XML in the encoding that it declares."""
    try:
        return ElementTree.fromstring(raw)
    except (ElementTree.ParseError, ValueError):
        # expat knows no encoding with several bytes per letter except Unicode's
        declared = _DECLARED.match(raw)
        return ElementTree.fromstring(raw.decode(declared[1].decode() if declared else "utf-8"))


def _parse_object(node: ElementTree.Element, path: Path) -> _Object:
    name, difficult, _ = (_text(node, tag, path) for tag in ("name", "difficult", "bndbox"))
    if not name:
        raise DataError(Problem(str(path), "has an object without a name", hint="name its class"))
    if difficult.lower() not in _ANSWERS:
        raise DataError(
            Problem(str(path), "does not say whether an object is difficult", difficult, "0 or 1")
        )
    return _Object(
        name,
        [_number(node, f"bndbox/{side}", path) for side in ("xmin", "ymin", "xmax", "ymax")],
        _ANSWERS[difficult.lower()],
    )


def _text(node: ElementTree.Element, where: str, path: Path) -> str:
    """Return the text of the element at a place; empty if there is no element."""
    texts = [(element.text or "").strip() for element in node.findall(where)]
    if len(texts) > 1:
        raise DataError(
            Problem(
                str(path),
                f"has {len(texts)} elements {where!r} in one {node.tag}",
                hint="write an object for each box",
            )
        )
    return "".join(texts)


def _number(node: ElementTree.Element, where: str, path: Path) -> float:
    text = _text(node, where, path)
    try:
        return float(text)
    except ValueError:
        raise DataError(
            Problem(
                str(path), f"has no number at {where}", text, "an annotation in Pascal VOC's format"
            )
        ) from None
