"""Boxes in pixels of the file, impossible ones, their labels in pictures, and the results that pycocotools reads."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import PIL.Image
import pycocotools.coco
import pycocotools.cocoeval
import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from samewise.datasets.coco import COCO
from samewise.datasets.digits_on_canvas import DigitsOnCanvas
from samewise.datasets.transforms.detection import RandomShortestSide
from samewise.recipes.detection import Detection
from samewise.recipes.parts.average_precision import Image as Found
from samewise.recipes.parts.detected import Detected
from samewise.recipes.parts.detection_pictures import save_prediction
from samewise.runner.errors import ConfigError, DataError


class Planted(nn.Module):
    """Finds objects at these places, given as parts of an image's width and height."""

    def __init__(self, boxes: Tensor) -> None:
        super().__init__()
        self.boxes = boxes

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        sizes = [torch.tensor([image.shape[-1], image.shape[-2]] * 2) for image in images]
        scores = torch.linspace(0.9, 0.5, len(self.boxes))
        return [{"boxes": self.boxes * size, "labels": torch.ones(len(self.boxes), dtype=torch.int64), "scores": scores} for size in sizes]


TO_OTHER_SIZES = {
    "as it is": ({}, [], []),
    "as it is read": ({"size": [512, 384]}, [], []),
    "by a transform of samples": ({}, [v2.Resize([300, 500])], []),
    "by a transform of batches": ({}, [], [RandomShortestSide(shortest=[480], longest=900)]),
    "by all": ({"size": [64, 80]}, [v2.Resize([300, 500])], [RandomShortestSide(shortest=[480], longest=900)]),
}


@pytest.mark.parametrize("how", TO_OTHER_SIZES)
def test_sizes_of_objects_and_results_are_in_pixels_of_the_file_however_it_is_resized(tmp_path: Path, how: str):
    """By pycocotools, on the annotations as they are in the file and detections in its pixels."""
    boxes = [[10.0, 20, 20, 20], [50, 20, 40, 60], [20, 90, 120, 100], [150, 30, 30, 30]]
    areas = [300.0, 1100, 9500, 950]  # of masks
    truth = {
        "images": [{"id": number, "file_name": f"{number}.png", "width": 200, "height": 200} for number in (1, 2)],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [
            {"id": 4 * number + place, "image_id": number, "category_id": 1, "bbox": box, "area": area, "iscrowd": 0}
            for number in (1, 2)
            for place, (box, area) in enumerate(zip(boxes, areas, strict=True))
        ],
    }
    for number in (1, 2):
        PIL.Image.new("RGB", (200, 200), (90, 10, 10)).save(tmp_path / f"{number}.png")
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    false = [[150.0, 150, 24, 24], [2, 2, 40, 40], [100, 2, 44, 44], [100, 100, 99, 99]]  # before the true ones
    x, y, width, height = torch.tensor([*false, *boxes[:3]]).unbind(1)
    model = Planted(torch.stack([x, y, x + width, y + height], 1) / 200)

    options, of_samples, of_batches = TO_OTHER_SIZES[how]
    data, recipe = COCO(root=str(tmp_path), images=".", annotations="truth.json", **options), Detection(num_classes=2)
    batch = recipe.collate([v2.Compose(of_samples or [v2.Identity()])(data[index]) for index in range(2)])
    for transform in of_batches:
        batch = transform(batch)
    scores = recipe.scores(data)
    scores.add(recipe.measure(model, batch))

    with contextlib.redirect_stdout(io.StringIO()):
        reference = pycocotools.coco.COCO(str(tmp_path / "truth.json"))
        results = [row for number, one in enumerate(recipe.predict(model, batch), start=1) for row in one.coco(number)]
        assert [row["bbox"] for row in results[:7]] == [pytest.approx(box, abs=0.02) for box in torch.stack([x, y, width, height], 1).tolist()]
        evaluator = pycocotools.cocoeval.COCOeval(reference, reference.loadRes(results), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    expected = dict(zip(("map", "map_50", "map_75", "map_small", "map_medium", "map_large"), evaluator.stats[:6], strict=True))
    assert len({round(expected[f"map_{size}"], 3) for size in ("small", "medium", "large")}) == 3
    assert {name: scores.compute()[name] for name in expected} == {name: pytest.approx(value, abs=1e-9) for name, value in expected.items()}


@pytest.mark.parametrize(
    "moved",
    [v2.Pad(20), v2.CenterCrop([30, 40]), v2.RandomHorizontalFlip(1.0), v2.RandomVerticalFlip(1.0), v2.RandomRotation((90, 90), expand=True)],
    ids=lambda one: type(one).__name__,
)
def test_an_evaluation_that_moves_the_picture_within_the_image_is_refused(tmp_path: Path, moved: v2.Transform):
    PIL.Image.new("RGB", (80, 64)).save(tmp_path / "a.png")
    sample = Detection().read(tmp_path / "a.png")
    resized = Detection().collate([v2.Compose([v2.Resize(50), v2.ColorJitter(0.5), v2.ToDtype(torch.float32, scale=True)])(sample)])
    assert resized["image"].shape[-2:] == (50, 62)
    with pytest.raises(ConfigError, match=r"transforms\.eval\.sample: crop, pad, flip or turn images"):
        Detection().collate([v2.Compose([moved, v2.Resize(50)])(sample)])


def sample_with(**values: object) -> dict[str, object]:
    return {**DigitsOnCanvas(split="train", length=1)[0], "image_id": 7, **values}


@pytest.mark.parametrize("box", [[20, 10, 10, 20], [-3, 0, 5, 5], [0, 0, 500, 5], [0, 0, float("nan"), 5]])
def test_an_impossible_box_is_reported_with_its_image(box: list[float]):
    with pytest.raises(DataError, match="image 7 of 128 x 96 pixels has an impossible box"):
        Detection().collate([sample_with(boxes=torch.tensor([box]), labels=torch.tensor([1]))])


def test_a_sample_without_matching_boxes_and_labels_is_refused():
    with pytest.raises(DataError, match="not an image with boxes"):
        Detection().collate([(torch.zeros(3, 4, 4), 1)])
    with pytest.raises(DataError, match="boxes \\[1, 4\\] and labels \\[2\\]"):
        Detection().collate([sample_with(boxes=torch.tensor([[0.0, 0, 5, 5]]), labels=torch.tensor([1, 2]))])


HEIGHT, WIDTH = 200, 300
NAMES = ["background", "dark blood cell"]
INSIDE = (100.0, 80.0, 160.0, 130.0)
EDGES = {
    "the top": (100.0, 0.0, 160.0, 60.0),
    "the left": (0.0, 80.0, 60.0, 130.0),
    "the right": (250.0, 80.0, 300.0, 130.0),
    "the bottom": (100.0, 150.0, 160.0, 200.0),
    "the upper right corner": (250.0, 0.0, 300.0, 60.0),
    "every edge": (0.0, 0.0, 300.0, 200.0),
    "more than the picture": (-20.0, -20.0, 320.0, 220.0),
}
LABEL = 0.7 * np.array([255, 127, 14])  # matplotlib's second colour, at an opacity of .7 over black


def label_area(file: Path) -> int:
    """The number of pixels with the background colour of a label."""
    pixels = np.asarray(PIL.Image.open(file).convert("RGB")).astype(float)
    return int((abs(pixels - LABEL).max(2) < 3).sum())


def found(box: tuple[float, float, float, float]) -> Found:
    none = torch.zeros(0)
    return Found((HEIGHT, WIDTH), torch.zeros(0, 4), none.long(), none.bool(), none, torch.tensor([box]), torch.tensor([1]), torch.tensor([0.9]))


@pytest.mark.parametrize("edge", EDGES)
def test_the_label_of_a_box_that_touches_an_edge_is_complete(edge: str, tmp_path: Path) -> None:
    black = torch.zeros(3, HEIGHT, WIDTH)
    whole = label_area(save_prediction(tmp_path / "inside.png", black, found(INSIDE), NAMES))
    assert whole > 200
    assert label_area(save_prediction(tmp_path / "edge.png", black, found(EDGES[edge]), NAMES)) >= 0.97 * whole  # more if less of the label lies on its box


CATEGORIES = {3: "cat", 7: "dog", 90: "bird"}


def annotate(root: Path, images: int) -> Path:
    """Write images with two boxes each, of the categories in turn."""
    (root / "images").mkdir()
    boxes = []
    for number in range(1, images + 1):
        PIL.Image.new("RGB", (96, 64), (20 * number % 255, 60, 90)).save(root / "images" / f"{number}.png")
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
