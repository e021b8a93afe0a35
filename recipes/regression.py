"""Regression: images, or columns of numbers, to one number or several."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.folders import IMAGES, TABLES
from samewise.datasets.parts.lists import numbers_in, read_rows
from samewise.recipes.models.mlp import Restore, Standardise
from samewise.recipes.parts import pictures
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.labelled_images import as_record, collate_images
from samewise.recipes.parts.losses import MeanSquared, of_samples
from samewise.recipes.parts.named_metrics import NamedMetrics
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch, Loss, Phase, Prediction, Recipe, Scores, class_names


@final
class Regression(Recipe):
    """Regression; batches are `{"features": float32[B, F], "label": float32[B, T]}`.

    With `reads="image"` they have `image` float32[B, C, H, W] in place of `features`. The model
    returns float32[B, T] in the targets' units. The loss is computed on targets divided by their
    standard deviation in the training split, if the model has a layer `Restore`, which knows it.

    Args:
        reads: The entry of a batch that the model takes: "features" or "image".
        features: The columns of tables that `predict` reads, in the order of `features`.
        channels: Channels of the images that `predict` reads: 1 is grey, 3 colour.
        loss: A module from outputs and targets, float32[B, T], to each sample's loss, float[B]
            (`parts.losses`); None: the mean squared error.
        metrics: Further metrics of an evaluation, by name (`parts.named_metrics`).
    """

    gives = "a row of numbers for each sample, one for each target, in the targets' units"

    def __init__(
        self,
        *,
        reads: Literal["features", "image"] = "features",
        features: Sequence[str] | None = None,
        channels: int = 3,
        loss: nn.Module | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        self.reads, self.features, self.channels = reads, list(features or ()), channels
        self.takes, self.extensions = (
            ("tables", TABLES) if reads == "features" else ("images", IMAGES)
        )
        self.criterion = loss or MeanSquared()
        self.metrics = NamedMetrics(metrics, taken=["loss", "mae", "rmse", "r2"])

    def prepare(self, model: nn.Module, dataset: Any) -> None:
        """Set the scales of columns and targets to those of the training split."""
        for layer in model.modules():
            if isinstance(layer, Standardise):
                entry = "label" if isinstance(layer, Restore) else self.reads
                values = getattr(dataset, "columns", {}).get(entry)
                ConfigError.raise_if(
                    values is None or values.shape[1:] != layer.mean.shape,
                    "dataset",
                    f"has no numbers to standardise the model's {entry} by",
                    form_of(values),
                    f"columns[{entry!r}]: a tensor [samples, {len(layer.mean)}]",
                )
                layer.fit(values)

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate samples: dicts with `features` or `image`, and `label`, or pairs of both.

        Raises:
            DataError: A sample has another form, or images differ in size.
        """
        records = [as_record(sample, self.reads) for sample in samples]
        inputs = [record[self.reads] for record in records]
        label = [torch.as_tensor(record["label"], dtype=torch.float32) for record in records]
        return {
            self.reads: torch.stack(inputs) if self.reads == "features" else collate_images(inputs),
            "label": torch.stack(label).reshape(len(label), -1),
        }

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the loss summed over the B samples, in float32 for any precision."""
        outputs, label = self._outputs(model, batch)
        return Loss(self._each(model, outputs, label).sum(), count=len(outputs))

    def measure(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return each sample's loss, its outputs and its targets."""
        outputs, label = self._outputs(model, batch)
        return self._each(model, outputs, label).cpu(), outputs.cpu(), label.cpu()

    def scores(self, dataset: Any) -> Scores:
        return RegressionScores(targets=class_names(dataset), metrics=self.metrics.copy_empty())

    def read(self, file: Path) -> dict[str, Any]:
        """Read an image, or all rows of a table, with a placeholder label."""
        if self.reads == "image":
            return {
                "image": read_image(file, mode="gray" if self.channels == 1 else "rgb"),
                "label": 0.0,
            }
        return {
            "features": numbers_in(
                read_rows(file, self.features, item="sample", setting="FILE"), self.features
            ),
            "label": 0.0,
        }

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        return [Estimated(x, self.classes) for x in model(batch[self.reads]).double().cpu()]

    def _outputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the model's outputs and the targets, float32[B, T] or wider, checked."""
        outputs, label = model(batch[self.reads]), batch["label"]
        if not isinstance(outputs, Tensor) or outputs.shape != label.shape:
            raise ConfigError(
                Problem(
                    "model",
                    "does not return one number for each target",
                    form_of(outputs),
                    f"a tensor {list(label.shape)}",
                    "set dataset.num_classes",
                )
            )
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return outputs, label.to(outputs.dtype)

    def _each(self, model: nn.Module, outputs: Tensor, label: Tensor) -> Tensor:
        """Return each sample's loss, float32[B]."""
        scale = next((x.std for x in model.modules() if isinstance(x, Restore)), 1.0)
        return of_samples(self.criterion, outputs / scale, label / scale)


@final
class RegressionScores(Scores):
    """Scores of a regression: the same bits however the split is cut into batches.

    Args:
        targets: The targets' names; empty: their numbers.
        metrics: Further metrics.
    """

    def __init__(self, *, targets: Sequence[str] = (), metrics: NamedMetrics) -> None:
        self._targets, self._metrics = targets, metrics
        self._measured = list[tuple[Tensor, Tensor, Tensor]]()

    def add(self, measured: tuple[Tensor, Tensor, Tensor]) -> None:
        self._measured.append(measured)
        self._metrics.add_numbers(*measured[1:])

    def compute(self) -> dict[str, float]:
        """Return `loss`, `mae`, `rmse`, `r2` and the metrics by name.

        They are the means over the targets of the mean absolute error, the root mean squared error
        and the coefficient of determination. Of several targets, each has its own too: `mae/NAME`.
        """
        losses, outputs, labels = map(torch.cat, zip(*self._measured, strict=True))
        each = [
            _errors(*column)
            for column in zip(
                outputs.double().t().tolist(), labels.double().t().tolist(), strict=True
            )
        ]
        reported = {"loss": math.fsum(losses.tolist()) / len(losses)} | {
            name: math.fsum(errors[name] for errors in each) / len(each) for name in each[0]
        }
        if len(each) > 1:
            for target, errors in zip(_names(self._targets, len(each)), each, strict=True):
                reported |= {f"{name}/{target}": value for name, value in errors.items()}
        return reported | self._metrics.compute()

    def doubts(self) -> list[Problem]:
        return list(self._metrics.doubts)

    def save_pictures(self, folder: Path) -> None:
        """Write `predictions.png`: the outputs over the true values, for each target."""
        _, outputs, labels = map(torch.cat, zip(*self._measured, strict=True))
        pictures.save_scatter(
            folder / "predictions.png", labels, outputs, _names(self._targets, outputs.shape[1])
        )


@final
class Estimated(Prediction):
    """The predicted numbers of an image, or of a table's rows.

    Args:
        numbers: float64[T], or float64[N, T] for N rows.
        targets: The targets' names, or none.
    """

    def __init__(self, numbers: Tensor, targets: Sequence[str] = ()) -> None:
        self.numbers, self.targets = numbers, _names(targets, numbers.shape[-1])

    def values(self) -> dict[str, Any]:
        return dict(zip(self.targets, self.numbers.t().tolist(), strict=True))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each row of the table, numbered from 1."""
        if self.numbers.dim() == 1:
            return [self.values()]
        return [
            {"row": row, **dict(zip(self.targets, x, strict=True))}
            for row, x in enumerate(self.numbers.tolist(), start=1)
        ]


def _names(targets: Sequence[str], count: int) -> list[str]:
    return list(targets) if len(targets) == count else [f"target_{x}" for x in range(count)]


def _errors(outputs: Sequence[float], labels: Sequence[float]) -> dict[str, float]:
    """Return MAE, RMSE and R2 of one target, with exact sums."""
    count, mean = len(labels), math.fsum(labels) / len(labels)
    errors = [output - label for output, label in zip(outputs, labels, strict=True)]
    squares, spread = (math.fsum(x * x for x in y) for y in (errors, [x - mean for x in labels]))
    return {
        "mae": math.fsum(map(abs, errors)) / count,
        "rmse": math.sqrt(squares / count),
        # Labels without spread leave nothing to determine
        "r2": 1.0 - squares / spread if spread else math.nan,
    }
