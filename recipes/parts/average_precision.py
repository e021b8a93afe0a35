"""COCO's average precision by its own evaluator, pycocotools.

It runs on the CPU, in the order of images, so results have the same bits each time.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, final

import numpy as np
from torch import Tensor

_STATS = (
    "map",
    "map_50",
    "map_75",
    "map_small",
    "map_medium",
    "map_large",
    "mar_1",
    "mar_10",
    "mar_100",
    "mar_small",
    "mar_medium",
    "mar_large",
)
_REPORTED = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_100")
# .5 is the first of the ten overlaps
_AT_50 = 0


@final
@dataclass(frozen=True)
class Image:
    """One image's N true boxes and M detections, on the CPU; boxes are (x1, y1, x2, y2) in pixels.

    Args:
        size: (height, width) in pixels.
        boxes: float32[N, 4], true boxes.
        labels: int64[N], from 1.
        crowd: bool[N], whether a box is a group; a detection in it counts neither as right nor
            wrong.
        area: float32[N] in square pixels: small below 32 x 32, large from 96 x 96, else medium.
        found_boxes: float32[M, 4], detections.
        found_labels: int64[M].
        found_scores: float32[M].
        masks: Run lengths of the N objects (`datasets.parts.masks`); None: there are no masks.
        found_masks: Those of the M detections.
    """

    size: tuple[int, int]
    boxes: Tensor
    labels: Tensor
    crowd: Tensor
    area: Tensor
    found_boxes: Tensor
    found_labels: Tensor
    found_scores: Tensor
    masks: Sequence[bytes] | None = None
    found_masks: Sequence[bytes] | None = None


@final
@dataclass(frozen=True)
class AveragePrecision:
    """Results of the evaluator.

    Args:
        stats: Twelve figures by name; -1 if there are no such boxes.
        precision: float64[10, 101, K], at each overlap from .5 to .95, each recall from 0 to 1, and
            each of K classes (labels 1 to K); -1 for a class without boxes.
        boxes: Number of true boxes of each label from 0, without crowds.
    """

    stats: dict[str, float]
    precision: np.ndarray
    boxes: list[int]

    @classmethod
    def of(
        cls, images: Sequence[Image], *, classes: int, by: Literal["bbox", "segm"] = "bbox"
    ) -> Self:
        """Evaluate `images`, whose labels are below `classes`, or the highest label plus one.

        Objects overlap by their boxes, or with "segm" by their masks.
        """
        highest = max(
            (
                int(labels.max())
                for image in images
                for labels in (image.labels, image.found_labels)
                if len(labels)
            ),
            default=0,
        )
        classes = max(classes, highest + 1)
        counts = [0] * classes
        for image in images:
            for label in image.labels[~image.crowd].tolist():
                counts[label] += 1
        # The evaluator prints its progress
        with contextlib.redirect_stdout(io.StringIO()):
            evaluator = _evaluate(images, classes, by)
        stats = {name: float(value) for name, value in zip(_STATS, evaluator.stats, strict=True)}
        return cls(stats, evaluator.eval["precision"][:, :, :, 0, -1], counts)

    def summary(self) -> dict[str, float]:
        """Return the reported figures: the first three always, others for sizes with boxes.

        Figures without boxes are 0.
        """
        figures = {
            name: self.stats[name]
            for name in _REPORTED
            if self.stats[name] >= 0 or name in _REPORTED[:3]
        }
        return {name: max(0.0, value) for name, value in figures.items()}

    def by_class(self) -> list[tuple[int, float, float]]:
        """Return (label, average precision over all IoUs, and at .5) of each class with boxes."""
        means = []
        for label in range(1, len(self.boxes)):
            if self.boxes[label]:
                class_precision = self.precision[:, :, label - 1]
                means.append(
                    (label, float(class_precision.mean()), float(class_precision[_AT_50].mean()))
                )
        return means

    def curve(self, label: int) -> np.ndarray:
        """Return float64[101]: the precision at recalls from 0 to 1, at an IoU of .5."""
        return self.precision[_AT_50, :, label - 1]


def _evaluate(images: Sequence[Image], classes: int, by: str) -> Any:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = COCO()
    truth.dataset = {
        "images": [
            {"id": number, "height": image.size[0], "width": image.size[1]}
            for number, image in enumerate(images, start=1)
        ],
        "categories": [{"id": label} for label in range(1, classes)],
        "annotations": _annotations(images),
    }
    truth.createIndex()
    detections = _detections(images) if by == "bbox" else _detected_masks(images)
    # loadRes takes no empty list
    results = truth.loadRes(detections) if len(detections) else COCO()
    evaluator = COCOeval(truth, results, by)
    evaluator.evaluate()
    evaluator.accumulate()
    evaluator.summarize()
    return evaluator


def _annotations(images: Sequence[Image]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for number, image in enumerate(images, start=1):
        rows = zip(
            image.boxes.double().tolist(),
            image.labels.tolist(),
            image.crowd.tolist(),
            image.area.tolist(),
            image.masks or [b""] * len(image.boxes),
            strict=True,
        )
        for (x1, y1, x2, y2), label, crowd, area, mask in rows:
            # COCO's boxes are [x, y, width, height]
            box = [x1, y1, x2 - x1, y2 - y1]
            entries.append(
                {
                    # From 1, since the evaluator takes a match with the id 0 for none
                    "id": len(entries) + 1,
                    "image_id": number,
                    "category_id": label,
                    "bbox": box,
                    "area": area,
                    "iscrowd": int(crowd),
                    "segmentation": {"size": image.size, "counts": mask},
                }
            )
    return entries


def _detected_masks(images: Sequence[Image]) -> list[dict[str, Any]]:
    return [
        {
            "image_id": number,
            "category_id": label,
            "score": score,
            "segmentation": {"size": image.size, "counts": mask},
        }
        for number, image in enumerate(images, start=1)
        for label, score, mask in zip(
            image.found_labels.tolist(),
            image.found_scores.double().tolist(),
            image.found_masks or (),
            strict=True,
        )
    ]


def _detections(images: Sequence[Image]) -> np.ndarray:
    """Return float64[M, 7]: image, x, y, width, height, score, label."""
    rows = []
    for number, image in enumerate(images, start=1):
        boxes, count = image.found_boxes.double().numpy(), len(image.found_boxes)
        columns = [np.full((count, 1), number), boxes[:, :2], boxes[:, 2:] - boxes[:, :2]]
        rows.append(
            np.hstack(
                [
                    *columns,
                    image.found_scores.double().numpy()[:, None],
                    image.found_labels.numpy()[:, None],
                ]
            )
        )
    return np.concatenate(rows)
