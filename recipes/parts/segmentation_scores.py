"""Measures a segmentation: the results of a batch, and of all batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from samewise.recipes.parts import pictures
from samewise.recipes.parts.named_metrics import NamedMetrics
from samewise.recipes.parts.segmented import save_segmentations
from samewise.recipes.parts.tables import write_csv
from samewise.runner.errors import DataError, Problem
from samewise.runner.interfaces import Scores


@dataclass(frozen=True)
class MeasuredSegmentation:
    """Measurements of one evaluation batch of B images, on the CPU.

    Args:
        losses: Each image's loss, summed over the pixels that count.
        pixels: Each image's number of such pixels.
        confusion: int64[K, K], their number by true and predicted class.
        shown: The first few images, small: uint8[5, h, w], colours, true labels and predicted ones.
        likely: Probabilities float[P, K] and labels int64[P] of such pixels, if there are metrics
            by name.
    """

    losses: Sequence[float]
    pixels: Sequence[int]
    confusion: Tensor
    shown: Sequence[Tensor]
    likely: Sequence[tuple[Tensor, Tensor]]


class SegmentationScores(Scores):
    """Scores of a segmentation, from exact counts of pixels.

    Args:
        names: The labels' names; empty: their numbers.
        num_classes: Number of labels.
        shown: Number of images that are drawn.
        metrics: Further metrics; None: none.
    """

    def __init__(
        self,
        *,
        names: Sequence[str] = (),
        num_classes: int,
        shown: int = 8,
        metrics: NamedMetrics | None = None,
    ) -> None:
        self.names = list(names) if len(names) == num_classes else [*map(str, range(num_classes))]
        # [true class, predicted class]
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self._metrics = (metrics or NamedMetrics(None)).copy_empty()
        self._most, self._shown = shown, list[Tensor]()
        self._loss, self._pixels = 0.0, 0

    def add(self, measured: MeasuredSegmentation) -> None:
        # One after the other, so that the sum does not depend on the batches
        for loss in measured.losses:
            self._loss += loss
        self._pixels += sum(measured.pixels)
        self.confusion += measured.confusion
        self._shown += measured.shown[: self._most - len(self._shown)]
        for probabilities, labels in measured.likely:
            self._metrics.add(probabilities, labels)

    def compute(self) -> dict[str, float]:
        """Return `loss` (per pixel), `miou`, `pixel_accuracy` and the metrics by name.

        `miou` is the mean over the classes that pixels or predictions have.

        Raises:
            DataError: No pixel of the split counts.
        """
        if not self._pixels:
            raise DataError("the evaluated split has no pixels that count")
        return {
            "loss": self._loss / self._pixels,
            "miou": float(self.overlaps().nanmean()),
            "pixel_accuracy": int(self.confusion.diag().sum()) / self._pixels,
            **self._metrics.compute(),
        }

    def overlaps(self) -> Tensor:
        """Return each class's intersection over union, float64[K]; NaN for a class without any."""
        right = self.confusion.diag()
        return right.double() / (self.confusion.sum(0) + self.confusion.sum(1) - right)

    def doubts(self) -> list[Problem]:
        return list(self._metrics.doubts)

    def save_pictures(self, folder: Path) -> None:
        """Write `segmentations.png`, `confusion_matrix.png` and `class_iou.csv`."""
        save_segmentations(folder / "segmentations.png", self._shown, len(self.names))
        pictures.save_confusion_matrix(folder / "confusion_matrix.png", self.confusion, self.names)
        rows = (
            [name, pixels, "" if overlap != overlap else f"{overlap:.4f}"]
            for name, pixels, overlap in zip(
                self.names, self.confusion.sum(1).tolist(), self.overlaps().tolist(), strict=True
            )
        )
        write_csv(folder / "class_iou.csv", ("class", "pixels", "iou"), rows)
