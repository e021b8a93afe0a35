"""Images with boxes and masks: COCO's format, Pascal VOC's layout, maps of classes in folders, polygons and run lengths."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from pycocotools.coco import COCO as Reference
from torch import Tensor

from samewise.datasets.coco import COCO
from samewise.datasets.mask_folder import MaskFolder
from samewise.datasets.pascal_voc import PascalVOC
from samewise.runner.errors import ConfigError, DataError
from samewise.runner.training.cautions import data_cautions

MAPS = np.random.default_rng(0).integers(0, 3, (4, 6, 8)).astype(np.uint8)
MAPS[0, 0] = 255


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four images and masks, two with a palette, and VOC's list of two of them."""
    for name in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (tmp_path / name).mkdir(parents=True)
    for number, labels in enumerate(MAPS):
        Image.fromarray(np.repeat(labels[:, :, None], 3, 2)).save(tmp_path / "JPEGImages" / f"{number}.png")
        mask = Image.fromarray(labels)
        if number % 2:
            mask.putpalette([channel for label in range(256) for channel in (label, 0, 255 - label)])
        mask.save(tmp_path / "SegmentationClass" / f"{number}.png")
    (tmp_path / "ImageSets/Segmentation/train.txt").write_text("3\n0\n")
    return tmp_path


def read(folder: Path, **settings) -> MaskFolder:
    return MaskFolder(root=str(folder), images_dir="JPEGImages", masks_dir="SegmentationClass", num_classes=3, **settings)


def test_masks_are_read_as_they_are_stored_and_lists_name_a_split(folder):
    data = read(folder, listed="ImageSets/Segmentation/train.txt")
    assert [data.path(place).stem for place in range(len(data))] == ["3", "0"]
    for place, number in enumerate((3, 0)):
        assert torch.equal(data[place]["mask"].as_subclass(Tensor), torch.from_numpy(MAPS[number]))
    parts = [read(folder, split=split, shares={"valid": 0.5, "test": 0.0}, key="b") for split in ("train", "valid")]
    assert sorted(part.path(place).stem for part in parts for place in range(len(part))) == ["0", "1", "2", "3"]
    before = data.fingerprint()
    Image.fromarray(MAPS[1]).save(folder / "SegmentationClass" / "0.png")
    assert data.fingerprint() != before


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("RGB", (8, 6)), "is not a map of classes"),
        (Image.new("L", (6, 8)), "has 6 x 8 pixels, but its image 8 x 6"),
        (None, "is listed in .* by name but missing"),
    ],
)
def test_a_mask_that_does_not_fit_is_named(folder, mask, message):
    file = folder / "SegmentationClass" / "3.png"
    file.unlink() if mask is None else mask.save(file)
    with pytest.raises(DataError, match=message) as raised:
        read(folder, listed="ImageSets/Segmentation/train.txt")[0]
    assert str(file) in str(raised.value)
    with pytest.raises(DataError, match=r"Mask: there is no such folder; hint: set dataset\.masks_dir"):
        MaskFolder(root=str(folder), images_dir="JPEGImages", masks_dir="Mask", num_classes=3)


SQUARE = [[1, 1, 9, 1, 9, 9, 1, 9]]
RUNS = {"size": [16, 20], "counts": [30, 10, 280]}
PACKED = {"size": [16, 20], "counts": "YP1:h2"}


def annotations(tmp_path: Path, *segmentations: object) -> Path:
    Image.new("RGB", (20, 16)).save(tmp_path / "a.png")
    objects = [
        {"id": 1 + place, "image_id": 7, "category_id": 1 + place % 2, "bbox": [1, 1, 8, 8], "area": 64, "iscrowd": 0, "segmentation": one}
        for place, one in enumerate(segmentations)
    ]
    names = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    content = {"images": [{"id": 7, "file_name": "a.png", "width": 20, "height": 16}], "annotations": objects, "categories": names}
    (tmp_path / "a.json").write_text(json.dumps(content))
    return tmp_path / "a.json"


def test_masks_of_objects_are_those_of_pycocotools(tmp_path):
    path = annotations(tmp_path, SQUARE, RUNS, [*SQUARE, [10, 10, 15, 10, 15, 14.5]])
    data, reference = COCO(root=str(tmp_path), images="", annotations="a.json", masks="objects"), Reference(str(path))
    true = [reference.annToMask(one) for one in reference.loadAnns([1, 2, 3])]
    assert torch.equal(data[0]["masks"].as_subclass(Tensor), torch.from_numpy(np.stack(true)))
    half = COCO(root=str(tmp_path), images="", annotations="a.json", masks="objects", size=[8, 10])[0]
    assert half["masks"].shape == (3, 8, 10)


def test_a_map_of_classes_leaves_out_other_categories_and_pixels_of_two_objects(tmp_path):
    annotations(tmp_path, SQUARE, [[5, 5, 15, 5, 15, 15, 5, 15]], [[12, 1, 18, 1, 18, 4, 12, 4]])
    settings = {"root": str(tmp_path), "images": "", "annotations": "a.json", "masks": "classes"}
    labels = COCO(**settings, classes=["dog", "cat"])[0]["mask"]
    assert [int(labels[row, column]) for row, column in ((0, 0), (2, 2), (7, 7), (12, 12), (2, 15))] == [0, 2, 255, 1, 2]
    dogs = COCO(**settings, classes=["dog"], unlisted="drop", training=True, least_area=60)
    assert sorted(set(dogs[0]["mask"].flatten().tolist())) == [0, 1]
    assert len(COCO(**settings, classes=["dog"], unlisted="drop", training=True, least_area=64)) == 0


@pytest.mark.parametrize(
    "segmentation",
    [
        *(None, [], [[1, 2, 3, 4]], [[1, 1, 9, 1, 9]], [[1, 1, 1e9, 1, 9, 9]], [["a"] * 6], "YP1:h2"),
        *({**RUNS, "counts": [30, 10]}, {**RUNS, "counts": [-1, 321]}, {**RUNS, "counts": [1.5] * 320}, {**PACKED, "counts": "1000"}, {"counts": None}),
    ],
)
def test_a_segmentation_that_cannot_be_is_refused(tmp_path, segmentation):
    annotations(tmp_path, SQUARE, segmentation)
    with pytest.raises(DataError, match="annotation 2: has no valid segmentation"):
        COCO(root=str(tmp_path), images="", annotations="a.json", masks="objects")


def content() -> dict[str, Any]:
    """Three images: 7 with a dog and a crowd of them, 3 with a cat, 5 without boxes."""
    return {
        "images": [{"id": number, "file_name": f"{number:04d}.jpg", "width": 40, "height": 30} for number in (7, 3, 5)],
        "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 18, "bbox": [1, 2, 10, 20], "area": 150.5, "iscrowd": 0},
            {"id": 2, "image_id": 7, "category_id": 18, "bbox": [0, 0, 40, 30], "area": 900, "iscrowd": 1},
            {"id": 3, "image_id": 3, "category_id": 17, "bbox": [30, 20, 11, 10.6], "area": 100, "iscrowd": 0},
        ],
    }


def write(root: Path, what: dict[str, Any]) -> Path:
    (root / "images").mkdir(exist_ok=True)
    for image in what["images"]:
        if "file_name" in image:
            Image.new("RGB", (40, 30), (200, 10, 10)).save(root / "images" / image["file_name"])
    (root / "boxes.json").write_text(json.dumps(what))
    return root


def load(root: Path, **options: Any) -> COCO:
    return COCO(root=str(root), images="images", annotations="boxes.json", **options)


def test_training_leaves_out_crowds_and_images_without_boxes(tmp_path: Path):
    what = content()
    what["annotations"].append({"id": 4, "image_id": 5, "category_id": 17, "bbox": [40, 0, 1, 5], "iscrowd": 0})  # outside the image
    assert load(write(tmp_path, content())).left_out == ""
    data = load(write(tmp_path, what), training=True)
    assert data.left_out == "1 object with a box of no area"
    assert [data[index]["image_id"] for index in range(len(data))] == [3, 7]
    assert data[1]["boxes"].tolist() == [[1, 2, 11, 22]]
    assert "crowd" not in data[1]


def test_labels_are_cocos_numbers_or_numbered_without_gaps(tmp_path: Path):
    write(tmp_path, content())
    kept, dense = load(tmp_path, num_classes=91), load(tmp_path, category_ids="dense", num_classes=3)
    assert (len(kept.classes), kept.classes[17], kept.classes[18]) == (91, "cat", "dog")
    assert dense.classes == ["background", "cat", "dog"]
    assert (dense.category_ids, kept.category_ids) == ([0, 17, 18], [])
    assert dense[2]["labels"].tolist() == [2, 2]
    with pytest.raises(DataError, match=r"dataset\.num_classes=3"):
        load(tmp_path, category_ids="dense", num_classes=91)
    with pytest.raises(DataError, match=r"has 2 classes \(\w+, \w+\), with numbers up to 18, with the background 19(.|\n)*dataset\.num_classes=19"):
        load(tmp_path, num_classes=10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bbox": [1, 2, -10, 20]}, r"boxes\.json, annotation 1: has an impossible box(.|\n)*-10"),
        ({"bbox": [-5, 2, 10, 20]}, r"annotation 1: a box has a negative corner; hint: correct the annotation\n    value: +'x -5 to 5, y 2 to 22'"),
        (
            {"bbox": [1, 2, 40.1, 20]},
            r"annotation 1: a box extends beyond the image of 40 x 30 pixels; hint: COCO's boxes are \[x, y, width(.|\n)*x 1 to 41\.1, y 2 to 22",
        ),
        ({"bbox": None}, "annotation 1: is incomplete: it has no bbox"),
        ({"image_id": None, "category_id": None}, "annotation 1: is incomplete: it has no image_id, category_id"),
        ({"image_id": [7]}, r"annotation 1: image_id is not valid; expected: a whole number below(.|\n)*\[7\]"),
        ({"category_id": {}}, "annotation 1: category_id is not valid"),
        ({"area": "large"}, r"annotation 1: area is not a number; expected: the object's area in square pixels(.|\n)*'large'"),
        ({"iscrowd": "0"}, r"annotation 1: iscrowd is not 0 or 1(.|\n)*'0'"),
        ({"id": None, "image_id": [7]}, r"boxes\.json, annotations\[0\]: image_id is not valid"),
        ({"image_id": 99}, r"annotation 1: belongs to an image that the file does not list(.|\n)*99"),
        ({"category_id": 3}, "annotation 1: has an unknown category"),
    ],
)
def test_an_impossible_annotation_is_reported_with_its_number(tmp_path: Path, change: dict[str, Any], message: str):
    what = content()
    what["annotations"][0] |= change
    with pytest.raises(DataError, match=message):
        load(write(tmp_path, what))


def test_a_missing_or_damaged_file_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"boxes\.json: the annotations cannot be read(.|\n)*dataset\.annotations names it"):
        load(tmp_path)
    write(tmp_path, content())
    (tmp_path / "images" / "0003.jpg").unlink()
    with pytest.raises(DataError, match=r"0003\.jpg: is listed in the annotations but missing"):
        load(tmp_path)
    (tmp_path / "boxes.json").write_text('{"images": [')
    with pytest.raises(DataError, match=r"boxes\.json: is not JSON, or is cut short"):
        load(tmp_path)
    (tmp_path / "boxes.json").write_text("{}")
    with pytest.raises(DataError, match="no list of images"):
        load(tmp_path)


def test_a_category_0_is_refused_because_0_is_the_background(tmp_path: Path):
    what = content()
    what["categories"].append({"id": 0, "name": "bird"})
    write(tmp_path, what)
    with pytest.raises(DataError, match="label 0 is the background"):
        load(tmp_path)
    assert load(tmp_path, category_ids="dense").classes == ["background", "bird", "cat", "dog"]


def test_boxes_that_are_shares_of_their_images_are_refused(tmp_path: Path):
    what = content()
    for one in what["annotations"]:
        one["bbox"] = [0.1, 0.2, 0.3, 0.4]
    with pytest.raises(DataError, match="the boxes are shares of the images; hint: multiply them by width and height"):
        load(write(tmp_path, what))


def test_names_that_two_categories_or_images_share_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="has two category names that look the same: 'dog' and 'dog'"):
        load(write(tmp_path, content() | {"categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "dog"}]}))
    with pytest.raises(DataError, match=r"two category names that look the same: 'cafe\u0301'"):
        load(write(tmp_path, content() | {"categories": [{"id": 18, "name": "caf\u00e9"}, {"id": 17, "name": "cafe\u0301"}]}))
    what = content()
    what["images"][0]["file_name"] = "./0003.jpg"
    with pytest.raises(DataError, match="lists a file twice"):
        load(write(tmp_path, what))


@pytest.mark.parametrize("name", ["images\\0003.jpg", "images/0003.jpg"])
def test_a_name_that_begins_with_the_folder_of_images_is_explained(tmp_path: Path, name: str):
    what = content()
    write(tmp_path, what)
    what["images"][1]["file_name"] = name
    (tmp_path / "boxes.json").write_text(json.dumps(what))
    with pytest.raises(DataError, match=r"hint: the name begins with the folder images, to which it is relative: write 0003\.jpg"):
        load(tmp_path)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_photographs_whose_size_does_not_show_that_they_are_turned_are_named(tmp_path: Path, orientation: int):
    what = content()
    what["images"][0] |= {"width": 30}  # 7 is a square
    write(tmp_path, what)
    (exif := Image.Exif())[ExifTags.Base.Orientation] = orientation
    for number, size in ((3, (40, 30)), (7, (30, 30))):
        Image.new("RGB", size).save(tmp_path / "images" / f"000{number}.jpg", exif=exif)
    what["annotations"] = what["annotations"][:1]
    (tmp_path / "boxes.json").write_text(json.dumps(what))
    data = load(tmp_path)
    assert data.turned == {1: [], 3: ["0003.jpg", "0007.jpg"]}.get(orientation, ["0007.jpg"])
    cautions = data_cautions(SimpleNamespace(dataset=data))  # pyright: ignore[reportArgumentType]
    assert [x.path for x in cautions if "0007.jpg" in x.message] == ["dataset.train"] * (orientation > 1)
    what["images"][1] |= {"width": 30, "height": 40}
    (tmp_path / "boxes.json").write_text(json.dumps(what))
    with pytest.raises(
        DataError, match=r"0003\.jpg: is 40 x 30 pixels, but its annotation says 30 x 40; hint: " + ("it has an EXIF" if orientation > 1 else "one of")
    ):
        load(tmp_path)[0]


def annotate(voc: Path, name: str, objects: list[tuple[str, tuple[float, ...]]], *, size: tuple[int, int] = (40, 30), difficult: int = 0) -> None:
    """Write the XML of an image of (width, height)."""
    parts = "".join(
        f"<object><name>{label}</name><difficult>{difficult}</difficult><bndbox>"
        + "".join(f"<{side}>{value}</{side}>" for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
        + "</bndbox></object>"
        for label, box in objects
    )
    size_text = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    (voc / "Annotations" / f"{name}.xml").write_text(f"<annotation><filename>{name}.jpg</filename>{size_text}{parts}</annotation>")


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """Four images: a has two boxes, b one, c none, d (of the validation list) one."""
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (tmp_path / part).mkdir(parents=True)
    for number, name in enumerate("abcd"):
        Image.new("RGB", (40, 30), (60 * number, 100, 100)).save(tmp_path / "JPEGImages" / f"{name}.jpg")
    annotate(tmp_path, "a", [("dog", (1, 2, 20, 22)), ("cat", (5, 5, 40, 30))])
    annotate(tmp_path, "b", [("cat", (10, 10, 20, 20))])
    annotate(tmp_path, "c", [])
    annotate(tmp_path, "d", [("bird", (0, 0, 10, 10))])
    (tmp_path / "ImageSets/Main/train.txt").write_text("a\nb\nc\n")
    (tmp_path / "ImageSets/Main/val.txt").write_text("d\n\n")
    return tmp_path


@pytest.mark.parametrize(
    ("box", "message"),
    [
        *(((20, 5, 10, 9), "inverted"), ((5, 9, 10, 5), "inverted"), ((-4, 5, 10, 9), "negative")),
        *(((5, 5, 41, 9), "beyond the image of 40 x 30"), ((5, 5, 10, 31), "beyond the image")),
        *(((5, 5, 5, 9), r"no area(.|\n)*empty_boxes=drop"), (("nan", 5, 9, 9), "finite")),
        (("", 5, 9, 9), "no number at bndbox/xmin"),
    ],
)
def test_an_impossible_box_is_reported_with_its_file(voc: Path, box: tuple[float, ...], message: str):
    annotate(voc, "b", [("cat", box)])
    with pytest.raises(DataError, match=rf"b\.xml: .*{message}"):
        PascalVOC(root=str(voc), split="train")


def test_a_missing_or_damaged_file_of_voc_is_named(voc: Path):
    (voc / "JPEGImages" / "b.jpg").unlink()
    with pytest.raises(DataError, match=r"b\.jpg: is listed in the annotations but missing"):
        PascalVOC(root=str(voc), split="train")
    (voc / "Annotations" / "b.xml").write_text("<annotation><size>")
    with pytest.raises(DataError, match=r"b\.xml: is not XML"):
        PascalVOC(root=str(voc), split="train")
    (voc / "Annotations" / "b.xml").unlink()
    with pytest.raises(DataError, match=r"b\.xml: is listed in train\.txt but missing"):
        PascalVOC(root=str(voc), split="train")


def test_resized_images_have_resized_boxes_and_are_the_same_from_memory(voc: Path):
    files, kept = (PascalVOC(root=str(voc), split="train", size=[15, 10], cache=cache) for cache in ("none", "memory"))
    sample = files[0]
    assert sample["image"].shape == (3, 15, 10)
    assert sample["boxes"].tolist() == [[0.25, 1, 5, 11], [1.25, 2.5, 10, 15]]
    assert sample["area"][0] == 19 * 20  # in the file
    assert sample["file_size"] == (30, 40)
    assert all(torch.equal(files[index]["image"], kept[index]["image"]) for index in range(3))
    with pytest.raises(ConfigError, match=r"dataset\.size"):
        PascalVOC(root=str(voc), split="train", size=[15])


@pytest.fixture
def unlisted_voc(tmp_path: Path) -> Path:
    """Forty PNG images, some in a subfolder, with annotations that name JPEGs, and without lists of splits."""
    (tmp_path / "Annotations" / "below").mkdir(parents=True)
    (tmp_path / "images" / "below").mkdir(parents=True)
    for number in range(40):
        name = f"below/x.{number}" if number % 4 == 0 else f"x.{number}"
        Image.new("RGB", (40, 30)).save(tmp_path / "images" / f"{name}.png")
        annotate(tmp_path, name, [(("dog", "cat")[number % 2], (1, 2, 20, 22))])
    return tmp_path


def unlisted(unlisted_voc: Path, split: str = "train", **options: object) -> PascalVOC:
    return PascalVOC(root=str(unlisted_voc), split=split, images_dir="images", shares={"valid": 0.3, "test": 0.2}, **options)  # type: ignore[arg-type]


def test_without_lists_mismatched_images_and_annotations_are_named(unlisted_voc: Path):
    (unlisted_voc / "images" / "x.1.png").rename(unlisted_voc / "images" / "x1.png")
    with pytest.raises(DataError, match=r"x\.1\.xml: has no image x\.1\.jpg"):
        unlisted(unlisted_voc)
    (unlisted_voc / "images" / "x1.png").rename(unlisted_voc / "images" / "x.2.jpg")
    with pytest.raises(DataError, match=r"x\.2\.(png|jpg): and x\.2\.(png|jpg) have the same annotation"):
        unlisted(unlisted_voc)
    with pytest.raises(DataError, match=r"is not a folder of images; hint: set dataset.images_dir=images"):
        PascalVOC(root=str(unlisted_voc), split="train", shares={"valid": 0.3})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<name>cat</name>", "", "has an object without a name"),
        (
            "</bndbox>",
            "</bndbox><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax></bndbox>",
            "has 2 elements 'bndbox' in one object; hint: write an object for each box",
        ),
        ("</name>", "</name><name>dog</name>", "has 2 elements 'name' in one object"),
        ("<xmin>", "<xmin>1</xmin><xmin>", "has 2 elements 'bndbox/xmin' in one object"),
        ("<width>40", "<width>40.5", "gives a size that no image has"),
    ],
)
def test_an_object_without_a_name_or_with_two_of_a_kind_is_refused(voc: Path, old: str, new: str, message: str):
    path = voc / "Annotations" / "b.xml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=rf"b\.xml: {message}"):
        PascalVOC(root=str(voc), split="train", num_classes=4)


def test_a_list_that_names_files_or_a_name_twice_is_refused(voc: Path):
    for listed in ("a.jpg", "JPEGImages/a.jpg"):
        (voc / "ImageSets/Main/train.txt").write_text(f"{listed}\n")
        with pytest.raises(DataError, match=r"a\.jpg\.xml: is listed in train\.txt but missing; hint: there is a\.xml"):
            PascalVOC(root=str(voc), split="train")
    (voc / "ImageSets/Main/train.txt").write_text("a\nb\na\n")
    with pytest.raises(DataError, match="lists a file twice"):
        PascalVOC(root=str(voc), split="train")


def test_xml_is_read_in_the_encoding_that_it_declares(voc: Path):
    path = voc / "Annotations" / "b.xml"
    path.write_bytes(('<?xml version="1.0" encoding="GBK"?>' + path.read_text().replace("cat", "\u732b")).encode("gbk"))
    assert "\u732b" in PascalVOC(root=str(voc), split="train").classes
    path.write_bytes(path.read_bytes().replace(b' encoding="GBK"', b"").replace("\u732b".encode("gbk"), "\u72d7\u72d7".encode("gbk")))
    with pytest.raises(DataError, match=r"b\.xml: is not XML, or is damaged: 'utf-8' codec can't decode"):
        PascalVOC(root=str(voc), split="train")
    path.write_bytes(b'<?xml version="1.0" encoding="klingon"?><a/>')
    with pytest.raises(DataError, match=r"b\.xml: is not XML, or is damaged: unknown encoding"):
        PascalVOC(root=str(voc), split="train")
