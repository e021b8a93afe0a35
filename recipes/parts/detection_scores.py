"""Measures a detection: the results of a batch, and of all batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from torch import Tensor

from samewise.recipes.parts import detection_pictures as pictures
from samewise.recipes.parts.average_precision import AveragePrecision, Image
from samewise.runner.interfaces import Scores


@dataclass(frozen=True)
class MeasuredDetection:
    """Measurements of one evaluation batch of B images, on the CPU.

    Args:
        images: The true boxes and detections.
        losses: Sums over the B images of each part of the loss; empty if the model returns none in
            evaluation.
        shown: The first few images, small, as uint8[3, h, w].
    """

    images: list[Image]
    losses: Mapping[str, float] = field(default_factory=dict)
    shown: list[Tensor] = field(default_factory=list)


@final
class DetectionScores(Scores):
    """COCO's average precision of all images, in order.

    Args:
        names: The labels' names, the background first; empty: their numbers.
        num_classes: Number of labels, with the background; 0: as many as occur.
        shown: Number of images that are drawn.
    """

    sometimes = tuple(f"{x}map_{y}" for x in ("", "mask_") for y in ("small", "medium", "large"))

    def __init__(self, *, names: Sequence[str] = (), num_classes: int = 0, shown: int = 12) -> None:
        self.names = [*names, *(str(label) for label in range(len(names), num_classes))]
        self.images: list[Image] = []
        self._most = shown
        self._losses: dict[str, float] = {}
        self._thumbnails: list[Tensor] = []
        self._found: AveragePrecision | None = None

    def add(self, measured: MeasuredDetection) -> None:
        for name, total in measured.losses.items():
            self._losses[name] = self._losses.get(name, 0.0) + total
        # Thumbnails are those of the first images, without a gap
        if len(self.images) == len(self._thumbnails):
            self._thumbnails.extend(measured.shown[: self._most - len(self._thumbnails)])
        self.images.extend(measured.images)
        self._found = None

    def compute(self) -> dict[str, float]:
        """Return `map` (IoU .5 to .95), `map_50`, `map_75`, figures by area, and `mar_100`.

        Figures by area are reported if there are such boxes; `loss` and its parts if the model
        returns them. With masks, `mask_map` and the others are those of the masks.
        """
        if losses := {name: total / len(self.images) for name, total in self._losses.items()}:
            losses = {"loss": sum(losses.values())} | {
                f"loss_{name}": value for name, value in losses.items()
            }
        figures = {**losses, **self.average_precision().summary()}
        if any(image.masks is not None and image.found_masks is not None for image in self.images):
            by_mask = AveragePrecision.of(self.images, classes=len(self.names), by="segm")
            figures |= {f"mask_{name}": value for name, value in by_mask.summary().items()}
        return figures

    def average_precision(self) -> AveragePrecision:
        """Return the average precision of all images so far."""
        self._found = self._found or AveragePrecision.of(self.images, classes=len(self.names))
        return self._found

    def save_pictures(self, folder: Path) -> None:
        """Write `detections.png`, `precision_recall.png` and `class_precision.csv`."""
        result = self.average_precision()
        pictures.save_detections(
            folder / "detections.png", self._thumbnails, self.images, self.names
        )
        pictures.save_precision_recall(folder / "precision_recall.png", result, self.names)
        pictures.save_class_precision(folder / "class_precision.csv", result, self.names)
