"""Images with boxes in COCO's format."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import ExifTags, Image

from samewise.datasets.coco import COCO
from samewise.runner.errors import DataError
from samewise.runner.training.cautions import data_cautions


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
