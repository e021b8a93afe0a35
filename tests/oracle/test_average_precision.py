"""COCO's average precision against pycocotools fed by hand from JSON, torchmetrics, and a second implementation of the definition in float64."""

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as run_lengths
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from samewise.recipes.detection import Detection
from samewise.recipes.parts.detection_scores import DetectionScores

CLASSES = 5
"""Including the background. No box is of class 3, and no detection is of class 4."""
AREAS = {"map": (0, 1e10), "map_small": (0, 32**2), "map_medium": (32**2, 96**2), "map_large": (96**2, 1e10)}
NAMES = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_1", "mar_10", "mar_100", "mar_small", "mar_medium", "mar_large")

Row = dict[str, Any]


def drawn_images(seed: int, count: int = 12) -> list[Row]:
    """Images with boxes of all sizes, crowds and separate areas, and with what a detector might find: near misses, duplicates, ties, nonsense."""
    chance, images = random.Random(seed), list[Row]()
    for number in range(count):
        true, found = list[Row](), list[Row]()
        for _ in range(0 if number == 1 else chance.randint(0, 7)):
            true.append({**_box(chance, chance.choice([8, 35, 60, 105, 150])), "label": chance.choice([1, 2, 4]), "crowd": chance.random() < 0.15})
            true[-1]["area"] = _area(true[-1]) * (1.0 if chance.random() < 0.3 else chance.uniform(0.4, 1.0))  # COCO's are of outlines
            for _ in range(chance.choice([0, 1, 1, 2, 5 if true[-1]["crowd"] else 3])):
                label = true[-1]["label"] if chance.random() < 0.8 else chance.choice([1, 2, 3])
                found.append({**_moved(chance, true[-1]), "label": 2 if label == 4 else label, "score": round(chance.random(), 1)})
        found += [{**_box(chance, 40), "label": chance.choice([1, 2, 3]), "score": round(chance.random() * 0.5, 2)} for _ in range(chance.randint(0, 4))]
        if number == 2:  # more than the hundred that count
            found += [{**_box(chance, 40), "label": 1, "score": 0.95} for _ in range(110)]
        chance.shuffle(found)
        images.append({"true": true, "found": [] if number == 3 else found})
    return images


def _box(chance: random.Random, size: float) -> Row:
    width, height = chance.uniform(0.7, 1.4) * size, chance.uniform(0.7, 1.4) * size
    x, y = chance.uniform(0, 500 - width), chance.uniform(0, 400 - height)
    return {"box": [float(np.float32(value)) for value in (x, y, x + width, y + height)]}


def _moved(chance: random.Random, one: Row) -> Row:
    x1, y1, x2, y2 = one["box"]
    shift = [chance.gauss(0, 0.12) * side for side in (x2 - x1, y2 - y1, x2 - x1, y2 - y1)]
    box = [float(np.float32(value + by)) for value, by in zip(one["box"], shift, strict=True)]
    return {"box": box if box[0] < box[2] and box[1] < box[3] else one["box"]}


def _area(one: Row) -> float:
    x1, y1, x2, y2 = one["box"]
    return (x2 - x1) * (y2 - y1)


def scores(images: list[Row], *, batch: int = 5) -> DetectionScores:
    """The recipe's scores for a model that finds the given detections."""

    class Finds(nn.Module):
        def forward(self, some: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            return [
                {"boxes": _boxes(one["found"]), "labels": _numbers(one["found"], "label"), "scores": torch.tensor([row["score"] for row in one["found"]])}
                for one in (images[int(image[0, 0, 0])] for image in some)
            ]

    recipe, model = Detection(num_classes=CLASSES), Finds()
    made = recipe.scores(None)
    for first in range(0, len(images), batch):
        numbers = range(first, min(first + batch, len(images)))
        made.add(recipe.measure(model, {name: [_sample(images, number)[name] for number in numbers] for name in _sample(images, 0)}))
    return made


def _sample(images: list[Row], number: int) -> Row:
    true = images[number]["true"]
    flags = {"crowd": torch.tensor([one["crowd"] for one in true], dtype=torch.bool), "area": torch.tensor([one["area"] for one in true], dtype=torch.float64)}
    return {"image": torch.full((3, 400, 500), float(number)), "boxes": _boxes(true), "labels": _numbers(true, "label"), **flags}


def _boxes(rows: list[Row]) -> torch.Tensor:
    return torch.tensor([row["box"] for row in rows]).view(-1, 4)


def _numbers(rows: list[Row], name: str) -> torch.Tensor:
    return torch.tensor([row[name] for row in rows], dtype=torch.int64)


def by_pycocotools(images: list[Row], folder: Path) -> dict[str, float]:
    """The twelve figures of pycocotools, from files in COCO's own format; -1 if there is nothing to find."""
    boxes = [{**one, "image_id": number} for number, image in enumerate(images) for one in image["true"]]
    found = [{**one, "image_id": number} for number, image in enumerate(images) for one in image["found"]]

    def row(one: Row) -> Row:
        x1, y1, x2, y2 = one["box"]
        return {"image_id": one["image_id"], "category_id": one["label"], "bbox": [x1, y1, x2 - x1, y2 - y1]}

    annotations = [{**row(one), "id": place, "area": one["area"], "iscrowd": int(one["crowd"])} for place, one in enumerate(boxes, start=1)]
    truth = {"images": [{"id": n} for n in range(len(images))], "categories": [{"id": n} for n in range(1, CLASSES)], "annotations": annotations}
    (folder / "truth.json").write_text(json.dumps(truth))
    (folder / "found.json").write_text(json.dumps([{**row(one), "score": float(np.float32(one["score"]))} for one in found]))
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(folder / "truth.json"))
        evaluator = COCOeval(coco, coco.loadRes(str(folder / "found.json")), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return dict(zip(NAMES, evaluator.stats.tolist(), strict=True))


def by_definition(images: list[Row], label: int, overlap: float, low: float, high: float) -> tuple[float, float] | None:
    """(average precision, recall) of one class: 101 points, a hundred detections an image, crowds and boxes of other areas counting neither way."""
    judged, total = list[tuple[float, bool]](), 0
    for image in images:
        true = [one for one in image["true"] if one["label"] == label]
        total += sum(not _ignored(one, low, high) for one in true)
        true.sort(key=lambda one: _ignored(one, low, high))
        taken = set[int]()
        ranked = sorted((one for one in image["found"] if one["label"] == label), key=lambda one: -np.float32(one["score"]))[:100]
        for one in ranked:
            match, best = None, min(overlap, 1 - 1e-10)
            for place, other in enumerate(true):
                if place in taken and not other["crowd"]:
                    continue
                if match is not None and not _ignored(true[match], low, high) and _ignored(other, low, high):
                    break  # a real box is preferred to one that does not count
                if (shared := _overlap(one, other)) >= best:
                    match, best = place, shared
            if match is not None:
                taken.add(match)
            ignored = _ignored(true[match], low, high) if match is not None else not low <= _area(one) <= high
            if not ignored:
                judged.append((float(np.float32(one["score"])), match is not None))
    if not total:
        return None
    right = np.cumsum([hit for _, hit in sorted(judged, key=lambda one: -one[0])])
    precision, recall = right / np.arange(1, len(right) + 1), right / total
    points = [max((p for p, r in zip(precision, recall, strict=True) if r >= wanted), default=0.0) for wanted in np.linspace(0, 1, 101)]
    return float(np.mean(points)), float(recall[-1]) if len(recall) else 0.0


def _ignored(one: Row, low: float, high: float) -> bool:
    return one["crowd"] or not low <= one["area"] <= high


def _overlap(found: Row, true: Row) -> float:
    """Intersection over union, or over the detection's area if the box is a crowd."""
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = found["box"], true["box"]
    shared = max(0.0, min(ax2, bx2) - max(ax1, bx1)) * max(0.0, min(ay2, by2) - max(ay1, by1))
    return shared / (_area(found) if true["crowd"] else _area(found) + _area(true) - shared)


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_equals_that_of_pycocotools_on_files(seed, tmp_path):
    images = drawn_images(seed)
    found, expected = scores(images), by_pycocotools(images, tmp_path)
    assert found.average_precision().stats == pytest.approx(expected, abs=1e-12)
    reported = found.compute()
    assert reported == pytest.approx({name: expected[name] for name in reported}, abs=1e-12)
    assert 0.02 < reported["map"] < 0.6


@pytest.mark.parametrize("seed", range(2))
def test_average_precision_equals_the_definition(seed):
    images, overlaps = drawn_images(seed), [0.5 + 0.05 * step for step in range(10)]
    found = scores(images)
    for name, (low, high) in AREAS.items():
        of_class = [[by_definition(images, label, overlap, low, high) for overlap in overlaps] for label in range(1, CLASSES)]
        there = [points for points in of_class if points[0] is not None]
        assert found.average_precision().stats[name] == pytest.approx(np.mean([ap for points in there for ap, _ in points]), abs=1e-9)
        assert found.average_precision().stats["mar" + (name[3:] or "_100")] == pytest.approx(np.mean([r for points in there for _, r in points]), abs=1e-9)
    for label, mean, at_50 in found.average_precision().by_class():
        points = [by_definition(images, label, overlap, 0, 1e10)[0] for overlap in overlaps]
        assert (mean, at_50) == pytest.approx((np.mean(points), points[0]), abs=1e-9)


@pytest.mark.parametrize(("kept", "missing"), [("true", "found"), ("found", "true")])
def test_with_nothing_found_or_nothing_to_find_all_figures_are_zero(kept, missing):
    images = [{kept: one[kept], missing: []} for one in drawn_images(0)]
    assert {value for name, value in scores(images).compute().items() if name.startswith("ma")} == {0.0}


@pytest.mark.parametrize("fault", ["crowds count as boxes", "areas are those of the boxes", "fifty of an image count", "labels are one too low"])
def test_a_planted_fault_changes_the_figures(fault, tmp_path):
    images = drawn_images(0)
    expected = by_pycocotools(images, tmp_path)
    for one in images:
        for row in one["true"]:
            row["crowd"] &= fault != "crowds count as boxes"
            row["area"] = _area(row) if fault == "areas are those of the boxes" else row["area"]
        if fault == "labels are one too low":
            one["found"] = [{**row, "label": max(1, row["label"] - 1)} for row in one["found"]]
        if fault == "fifty of an image count":
            one["found"] = sorted(one["found"], key=lambda row: -row["score"])[:50]
    assert scores(images).average_precision().stats != pytest.approx(expected, abs=1e-4)


HEIGHT, WIDTH, MASK_CLASSES = 40, 60, 4


def objects(count: int, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Rectangles with a corner missing, and their boxes."""
    masks, boxes = torch.zeros(count, HEIGHT, WIDTH, dtype=torch.uint8), []
    for mask in masks:
        top, left = int(draw.integers(0, 20)), int(draw.integers(0, 30))
        bottom, right = top + int(draw.integers(8, 20)), left + int(draw.integers(8, 30))
        mask[top:bottom, left:right] = 1
        mask[top : top + 3, left : left + 3] = 0
        boxes.append([left, top, right, bottom])
    return masks, torch.tensor(boxes, dtype=torch.float32)


class Found(nn.Module):
    """Each true mask shifted by a few pixels, and one more, with scores at random."""

    def __init__(self, answers: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.answers = iter(answers)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [next(self.answers) for _ in images]


def test_the_precision_of_masks_is_pycocotools_own():
    draw, samples, answers = np.random.default_rng(3), [], []
    truth, results = {"images": [], "annotations": [], "categories": [{"id": label} for label in range(1, MASK_CLASSES)]}, []
    for number in range(1, 9):
        masks, boxes = objects(3, draw)
        labels, scores = torch.from_numpy(draw.integers(1, MASK_CLASSES, 3)), torch.from_numpy(draw.random(4)).float()
        found = torch.cat([masks.roll(int(draw.integers(0, 4)), 2), objects(1, draw)[0]])
        guesses = torch.cat([labels, labels[:1]])
        samples.append({"image": torch.zeros(3, HEIGHT, WIDTH), "boxes": boxes, "labels": labels, "masks": masks, "image_id": number})
        answers.append({"boxes": torch.rand(4, 4), "labels": guesses, "scores": scores, "masks": found[:, None] * 0.9})
        truth["images"].append({"id": number, "height": HEIGHT, "width": WIDTH})
        for mask, box, label in zip(masks, boxes, labels.tolist(), strict=True):
            x1, y1, x2, y2 = box.tolist()
            one = {"segmentation": run_lengths.encode(np.asfortranarray(mask)), "area": (x2 - x1) * (y2 - y1), "bbox": [x1, y1, x2 - x1, y2 - y1]}
            truth["annotations"].append({"id": len(truth["annotations"]) + 1, "image_id": number, "category_id": label, "iscrowd": 0, **one})
        for mask, label, score in zip(found, guesses.tolist(), scores.tolist(), strict=True):
            results.append({"image_id": number, "category_id": label, "score": score, "segmentation": run_lengths.encode(np.asfortranarray(mask))})
    recipe = Detection(num_classes=MASK_CLASSES)
    scores = recipe.scores(None)
    for start in (0, 5):
        batch = recipe.collate(samples[start : start + 5])
        scores.add(recipe.measure(Found(answers[start : start + 5]), batch))
    reference = COCO()
    reference.dataset = truth
    reference.createIndex()
    evaluator = COCOeval(reference, reference.loadRes(results), "segm")
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    computed = scores.compute()
    expected = dict(zip(("mask_map", "mask_map_50", "mask_map_75"), evaluator.stats, strict=False))
    assert 0.1 < expected["mask_map"] < expected["mask_map_50"] < 1
    assert {name: computed[name] for name in expected} == {name: float(value) for name, value in expected.items()}
    assert computed["mask_map"] > computed["map"]
