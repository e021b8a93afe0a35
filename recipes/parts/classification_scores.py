"""Measures a classification: the results of a batch, and of all batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from samewise.recipes.parts import pictures
from samewise.recipes.parts.named_metrics import NamedMetrics
from samewise.runner.errors import Problem
from samewise.runner.interfaces import Scores


@dataclass(frozen=True)
class MeasuredClassification:
    """Measurements of one evaluation batch of B images, on the CPU.

    Args:
        loss: float32[B], the cross-entropy in nats against the true label, or the recipe's loss,
            without smoothing.
        label: int64[B], the true class.
        prediction: int64[B], the class with the largest logit (the first of equals).
        rank: int64[B], the number of classes ranked before the true one: 0 if the model is right,
            below k for a top-k hit.
        confidence: float[B], the prediction's probability.
        num_classes: K, the model's outputs.
        shown: int64[S], positions in the batch of the images kept for pictures.
        thumbnails: uint8[S, C, h, w], those images, small, each stretched to its own range.
        probabilities: float[B, K], if there are metrics by name.
        labels: float[B, K], if images may have several labels; `label` is then the one that the
            model ranks first, and 0 without labels.
    """

    loss: Tensor
    label: Tensor
    prediction: Tensor
    rank: Tensor
    confidence: Tensor
    num_classes: int
    shown: Tensor
    thumbnails: Tensor
    probabilities: Tensor | None = None
    labels: Tensor | None = None


class ClassificationScores(Scores):
    """Scores of a classification: the same bits however the split is cut into batches.

    Counts are integers; the loss is a float64 sum in sample order.

    Args:
        classes: The labels' names; empty: their numbers.
        top_k: As in the recipe.
        metrics: Further metrics; None: none.
    """

    def __init__(
        self,
        *,
        classes: Sequence[str] = (),
        top_k: Sequence[int] = (1, 5),
        metrics: NamedMetrics | None = None,
    ) -> None:
        self.classes = list(classes)
        self._metrics = metrics.copy_empty() if metrics else None
        self.top_k = tuple(dict.fromkeys(top_k))
        self.count = 0
        # [true class, predicted class]
        self.confusion = torch.zeros(0, 0, dtype=torch.int64)
        self._several = False
        self._loss = 0.0
        self._hits = dict.fromkeys(self.top_k, 0)
        self.sheet = pictures.PredictionSheet()

    def add(self, measured: MeasuredClassification) -> None:
        classes, labels = measured.num_classes, measured.labels
        self._several |= labels is not None
        if not self.count:
            self.confusion = torch.zeros(classes, classes, dtype=torch.int64)
        cells = measured.label * classes + measured.prediction
        self.confusion.view(-1).index_add_(0, cells, torch.ones_like(cells))
        for k in [k for k in self.top_k if k <= classes]:
            self._hits[k] += int((measured.rank < k).sum())
        # One after the other, so that the sum does not depend on the batches
        for loss in measured.loss.tolist():
            self._loss += loss
        if self._metrics is not None and measured.probabilities is not None:
            self._metrics.add(measured.probabilities, measured.label if labels is None else labels)
        for position, thumbnail in zip(measured.shown.tolist(), measured.thumbnails, strict=True):
            if labels is not None and not labels[position].any():
                continue
            label, prediction = int(measured.label[position]), int(measured.prediction[position])
            self.sheet.add(
                thumbnail,
                label,
                prediction,
                float(measured.confidence[position]),
                float(measured.loss[position]),
                self.count + position,
            )
        self.count += len(measured.label)

    def compute(self) -> dict[str, float]:
        """Return `loss` (nats per image), `accuracy`, top-k accuracies and the metrics by name.

        `accuracy_top5` is reported for more than five classes.
        """
        reported = {"loss": self._loss / self.count}
        for k in self.top_k:
            if k == 1 or k < len(self.confusion):
                reported["accuracy" if k == 1 else f"accuracy_top{k}"] = self._hits[k] / self.count
        return reported | (self._metrics.compute() if self._metrics is not None else {})

    def doubts(self) -> list[Problem]:
        return list(self._metrics.doubts) if self._metrics is not None else []

    def names(self) -> list[str]:
        """Return K names: the data set's if it has one for each output, else the class numbers."""
        count = len(self.confusion)
        return (
            self.classes if len(self.classes) == count else [str(number) for number in range(count)]
        )

    def save_sheet(self, folder: Path) -> None:
        """Draw some predictions, into `predictions.png`."""
        self.sheet.save(folder / "predictions.png", self.names())

    def save_pictures(self, folder: Path) -> None:
        """Write `predictions.png`, `confusion_matrix.png` and `class_accuracy.csv`.

        The last two need images of one label.
        """
        self.save_sheet(folder)
        if not self._several:
            pictures.save_confusion_matrix(
                folder / "confusion_matrix.png", self.confusion, self.names()
            )
            pictures.save_class_accuracy(
                folder / "class_accuracy.csv", self.confusion, self.names()
            )
