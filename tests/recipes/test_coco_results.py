"""pycocotools reads what `predict --format coco` writes, next to a user's annotations, whatever the numbers of their categories are."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from samewise.datasets.coco import COCO
from samewise.recipes.parts.average_precision import Image as Found
from samewise.recipes.parts.detected import Detected

CATEGORIES = {3: "cat", 7: "dog", 90: "bird"}


def annotate(root: Path, images: int) -> Path:
    """Write images with two boxes each, of the categories in turn."""
    (root / "images").mkdir()
    boxes = []
    for number in range(1, images + 1):
        Image.new("RGB", (96, 64), (20 * number % 255, 60, 90)).save(root / "images" / f"{number}.png")
        corners = [[4 + number, 5, 30, 20], [50, 30, 25.5, 31.25]]
        boxes += [{"image_id": number, "category_id": [*CATEGORIES][(number + place) % 3], "bbox": box} for place, box in enumerate(corners)]
    content = {
        "images": [{"id": number, "file_name": f"{number}.png", "width": 96, "height": 64} for number in range(1, images + 1)],
        "categories": [{"id": number, "name": name} for number, name in CATEGORIES.items()],
        "annotations": [{"id": place, "iscrowd": 0, "area": box["bbox"][2] * box["bbox"][3], **box} for place, box in enumerate(boxes, 1)],
    }
    (root / "annotations.json").write_text(json.dumps(content))
    return root


def average_precision(annotations: Path, results: Path) -> float:
    from pycocotools.coco import COCO as Annotations
    from pycocotools.cocoeval import COCOeval

    truth = Annotations(str(annotations))
    evaluator = COCOeval(truth, truth.loadRes(str(results)), "bbox")
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    return float(evaluator.stats[0])


@pytest.mark.parametrize("category_ids", ["keep", "dense"])
@pytest.mark.parametrize("classes", [None, ["bird", "lion", "cat", "dog"]])
def test_the_true_boxes_have_an_average_precision_of_one(tmp_path: Path, category_ids: str, classes: list[str] | None) -> None:
    root = annotate(tmp_path, 6)
    data = COCO(root=str(root), images="images", annotations="annotations.json", category_ids=category_ids, classes=classes)  # pyright: ignore[reportArgumentType]
    results = []
    for index in range(len(data)):
        sample = data[index]
        truth = (sample["boxes"], sample["labels"])
        found = Found((64, 96), *truth, sample["crowd"], sample["area"], *truth, torch.linspace(0.9, 0.8, len(truth[1])))
        results += Detected(found, torch.zeros(3, 64, 96), data.classes, data.category_ids).coco(int(sample["image_id"]))
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert average_precision(root / "annotations.json", tmp_path / "results.json") == pytest.approx(1)
