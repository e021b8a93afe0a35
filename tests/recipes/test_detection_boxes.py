"""Boxes and sizes are in pixels of the file; samples that cannot be right are refused."""

import contextlib
import io
import json
from pathlib import Path

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
