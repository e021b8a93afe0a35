"""Average precision of masks against pycocotools' own evaluation of a file, from masks in pixels."""

import numpy as np
import torch
from pycocotools import mask as run_lengths
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from samewise.recipes.detection import Detection

HEIGHT, WIDTH, CLASSES = 40, 60, 4


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
    truth, results = {"images": [], "annotations": [], "categories": [{"id": label} for label in range(1, CLASSES)]}, []
    for number in range(1, 9):
        masks, boxes = objects(3, draw)
        labels, scores = torch.from_numpy(draw.integers(1, CLASSES, 3)), torch.from_numpy(draw.random(4)).float()
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
    recipe = Detection(num_classes=CLASSES)
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
