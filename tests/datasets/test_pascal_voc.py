"""Images with boxes in the layout of Pascal VOC."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from samewise.datasets.pascal_voc import PascalVOC
from samewise.runner.errors import ConfigError, DataError


def annotate(root: Path, name: str, objects: list[tuple[str, tuple[float, ...]]], *, size: tuple[int, int] = (40, 30), difficult: int = 0) -> None:
    """Write the XML of an image of (width, height)."""
    parts = "".join(
        f"<object><name>{label}</name><difficult>{difficult}</difficult><bndbox>"
        + "".join(f"<{side}>{value}</{side}>" for side, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
        + "</bndbox></object>"
        for label, box in objects
    )
    size_text = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    (root / "Annotations" / f"{name}.xml").write_text(f"<annotation><filename>{name}.jpg</filename>{size_text}{parts}</annotation>")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four images: a has two boxes, b one, c none, d (of the validation list) one."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
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
def test_an_impossible_box_is_reported_with_its_file(root: Path, box: tuple[float, ...], message: str):
    annotate(root, "b", [("cat", box)])
    with pytest.raises(DataError, match=rf"b\.xml: .*{message}"):
        PascalVOC(root=str(root), split="train")


def test_a_missing_or_damaged_file_is_named(root: Path):
    (root / "JPEGImages" / "b.jpg").unlink()
    with pytest.raises(DataError, match=r"b\.jpg: is listed in the annotations but missing"):
        PascalVOC(root=str(root), split="train")
    (root / "Annotations" / "b.xml").write_text("<annotation><size>")
    with pytest.raises(DataError, match=r"b\.xml: is not XML"):
        PascalVOC(root=str(root), split="train")
    (root / "Annotations" / "b.xml").unlink()
    with pytest.raises(DataError, match=r"b\.xml: is listed in train\.txt but missing"):
        PascalVOC(root=str(root), split="train")


def test_resized_images_have_resized_boxes_and_are_the_same_from_memory(root: Path):
    files, kept = (PascalVOC(root=str(root), split="train", size=[15, 10], cache=cache) for cache in ("none", "memory"))
    sample = files[0]
    assert sample["image"].shape == (3, 15, 10)
    assert sample["boxes"].tolist() == [[0.25, 1, 5, 11], [1.25, 2.5, 10, 15]]
    assert sample["area"][0] == 19 * 20  # in the file
    assert sample["file_size"] == (30, 40)
    assert all(torch.equal(files[index]["image"], kept[index]["image"]) for index in range(3))
    with pytest.raises(ConfigError, match=r"dataset\.size"):
        PascalVOC(root=str(root), split="train", size=[15])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty PNG images, some in a subfolder, with annotations that name JPEGs, and without lists of splits."""
    (tmp_path / "Annotations" / "below").mkdir(parents=True)
    (tmp_path / "images" / "below").mkdir(parents=True)
    for number in range(40):
        name = f"below/x.{number}" if number % 4 == 0 else f"x.{number}"
        Image.new("RGB", (40, 30)).save(tmp_path / "images" / f"{name}.png")
        annotate(tmp_path, name, [(("dog", "cat")[number % 2], (1, 2, 20, 22))])
    return tmp_path


def unlisted(folder: Path, split: str = "train", **options: object) -> PascalVOC:
    return PascalVOC(root=str(folder), split=split, images_dir="images", shares={"valid": 0.3, "test": 0.2}, **options)  # type: ignore[arg-type]


def test_without_lists_mismatched_images_and_annotations_are_named(folder: Path):
    (folder / "images" / "x.1.png").rename(folder / "images" / "x1.png")
    with pytest.raises(DataError, match=r"x\.1\.xml: has no image x\.1\.jpg"):
        unlisted(folder)
    (folder / "images" / "x1.png").rename(folder / "images" / "x.2.jpg")
    with pytest.raises(DataError, match=r"x\.2\.(png|jpg): and x\.2\.(png|jpg) have the same annotation"):
        unlisted(folder)
    with pytest.raises(DataError, match=r"is not a folder of images; hint: set dataset.images_dir=images"):
        PascalVOC(root=str(folder), split="train", shares={"valid": 0.3})


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
def test_an_object_without_a_name_or_with_two_of_a_kind_is_refused(root: Path, old: str, new: str, message: str):
    path = root / "Annotations" / "b.xml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=rf"b\.xml: {message}"):
        PascalVOC(root=str(root), split="train", num_classes=4)


def test_a_list_that_names_files_or_a_name_twice_is_refused(root: Path):
    for listed in ("a.jpg", "JPEGImages/a.jpg"):
        (root / "ImageSets/Main/train.txt").write_text(f"{listed}\n")
        with pytest.raises(DataError, match=r"a\.jpg\.xml: is listed in train\.txt but missing; hint: there is a\.xml"):
            PascalVOC(root=str(root), split="train")
    (root / "ImageSets/Main/train.txt").write_text("a\nb\na\n")
    with pytest.raises(DataError, match="lists a file twice"):
        PascalVOC(root=str(root), split="train")


def test_xml_is_read_in_the_encoding_that_it_declares(root: Path):
    path = root / "Annotations" / "b.xml"
    path.write_bytes(('<?xml version="1.0" encoding="GBK"?>' + path.read_text().replace("cat", "\u732b")).encode("gbk"))
    assert "\u732b" in PascalVOC(root=str(root), split="train").classes
    path.write_bytes(path.read_bytes().replace(b' encoding="GBK"', b"").replace("\u732b".encode("gbk"), "\u72d7\u72d7".encode("gbk")))
    with pytest.raises(DataError, match=r"b\.xml: is not XML, or is damaged: 'utf-8' codec can't decode"):
        PascalVOC(root=str(root), split="train")
    path.write_bytes(b'<?xml version="1.0" encoding="klingon"?><a/>')
    with pytest.raises(DataError, match=r"b\.xml: is not XML, or is damaged: unknown encoding"):
        PascalVOC(root=str(root), split="train")
