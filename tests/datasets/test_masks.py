"""Masks from files: maps of classes in folders and in Pascal VOC's layout, polygons and run lengths of COCO."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO as Reference
from torch import Tensor

from samewise.datasets.coco import COCO
from samewise.datasets.mask_folder import MaskFolder
from samewise.runner.errors import DataError

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
