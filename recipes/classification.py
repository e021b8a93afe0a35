"""Image classification: one label per image, or with some losses several, cross-entropy, accuracy,
and the confusion matrix.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from samewise.datasets.parts.channels import read_channels
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.folders import IMAGES, VIDEOS
from samewise.datasets.parts.upright import read_upright
from samewise.datasets.parts.video_files import centre, clip_frames, read_frames
from samewise.recipes.parts import pictures
from samewise.recipes.parts.classification_scores import (
    ClassificationScores,
    MeasuredClassification,
)
from samewise.recipes.parts.labelled_images import as_record, collate_images, stack_images
from samewise.recipes.parts.losses import CrossEntropy, is_sigmoid, shares
from samewise.recipes.parts.named_metrics import NamedMetrics
from samewise.recipes.parts.test_time import check_kind, views
from samewise.runner.errors import ConfigError, DataError, Problem, none_hint
from samewise.runner.interfaces import Batch, Loss, Phase, Prediction, Recipe, class_names


class Classification(Recipe):
    """Batches are `{"image": float32[B, C, H, W], "label": int64[B]}`.

    MixUp and CutMix make the label float32[B, K]. Clips are float32[B, C, T, H, W].

    Args:
        num_classes: K, to find a label out of range in the loader's worker; None: the first batch
            is checked against the model's outputs.
        label_smoothing: The share of the target that is spread evenly over all classes (arXiv
            1512.00567, section 7). In training only: evaluation reports the plain cross-entropy, so
            that losses compare between settings.
        top_k: The k of each top-k accuracy to report; those that are not below K are left out,
            except 1.
        channels: Of the images that `predict` reads: 1 is grey and 3 colour; any number with the
            mode "channels".
        reads: What `predict` takes from a video: `frames`, None where it reads images, and the
            `stride` from one to the next; and the `mode` of images, as in
            `datasets.parts.image_files.ImageFiles`, and whether they are turned `upright`
            (`datasets.parts.upright`).
        loss: From logits float32[B, K] and labels, int64[B] or float32[B, K], to each image's loss,
            float[B] (`parts.losses`), in training and in evaluation; None: cross-entropy. With a
            sigmoid for its `link`, labels float32[B, K] are zeros and ones: each image has any
            number of labels.
        metrics: More metrics of an evaluation, by name (`parts.named_metrics`).
        test_time_augmentation: `none`, `flip` or `flip_and_translate`: evaluate and predict by the
            mean of the logits of 1, 2 or 6 versions of each image (`parts.test_time`). An export
            has the model alone.
    """

    gives = (
        "one row of scores for each sample; softmax turns them into probabilities, and the "
        "largest gives the class"
    )

    def __init__(
        self,
        *,
        num_classes: int | None = None,
        label_smoothing: float = 0.0,
        top_k: Sequence[int] = (1, 5),
        channels: int = 3,
        reads: Mapping[str, Any] | None = None,
        loss: nn.Module | None = None,
        metrics: Mapping[str, Any] | None = None,
        test_time_augmentation: str = "none",
    ) -> None:
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigError(
                Problem(
                    "recipe.label_smoothing",
                    "is not a valid share",
                    label_smoothing,
                    "a number from 0 to 1",
                )
            )
        if any(k < 1 for k in top_k):
            raise ConfigError(
                Problem(
                    "recipe.top_k", "is not a list of ranks", list(top_k), "whole numbers from 1"
                )
            )
        self._as_stored = (reads or {}).get("mode") == "channels"
        self._read_image = read_upright if (reads or {}).get("upright") else read_image
        if channels < 1 or (channels not in (1, 3) and not self._as_stored):
            expected = "1 (grey) or 3 (colour); or others if the data set has mode: channels"
            raise ConfigError(
                Problem(
                    "recipe.channels", "is not a valid number of image channels", channels, expected
                )
            )
        self.channels = channels
        self._frames, self._stride = (reads or {}).get("frames"), (reads or {}).get("stride") or 1
        self.takes, self.extensions = ("videos", VIDEOS) if self._frames else ("images", IMAGES)
        if self._as_stored:
            self.extensions = (*IMAGES, ".npy")
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.top_k = tuple(top_k)
        self.criterion = loss
        self._separate = is_sigmoid(loss)
        self._of_shares = (
            isinstance(loss, CrossEntropy | nn.CrossEntropyLoss | None)
            and type(self).loss is Classification.loss
        )
        if self._separate:
            self.gives = (
                "one row of scores for each sample; sigmoid turns each into the probability of "
                "its class, whatever the others are"
            )
        self.metrics = NamedMetrics(
            metrics, taken=["loss", "accuracy", *(f"accuracy_top{k}" for k in top_k)]
        )
        self._views = check_kind(test_time_augmentation, "recipe.test_time_augmentation")
        self._range_is_known = num_classes is not None

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples to a batch.

        Each is a dict with `image` and `label`, or a pair of them as torchvision's data sets give.

        An image is a tensor[C, H, W] or a clip[T, C, H, W] (kept as it is), a PIL image or an
        array[H, W] or [H, W, C] (made uint8[C, H, W]). A label is an integer, or float[K], which
        for a cross-entropy adds up to 1. Images that the device decodes (`datasets.parts.encoded`)
        stay encoded.

        Raises: DataError: images of different sizes, a sample of another form, or a label that the
            loss cannot take.
        """
        records = [as_record(sample) for sample in samples]
        batch = {
            "image": collate_images([record["image"] for record in records]),
            "label": self.labels([record["label"] for record in records]),
        }
        if len(records[0]) > 2:
            batch |= default_collate(
                [
                    {name: value for name, value in record.items() if name not in batch}
                    for record in records
                ]
            )
        return batch

    def require(self, batch: Batch) -> None:
        if self.num_classes is not None and batch["label"].dim() == 1:
            _check_range(batch["label"], self.num_classes, f"there are {self.num_classes} classes")
        if "label" in batch:
            self._require_shares(batch["label"])

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """The loss summed over the B images, in float32 for any precision of the model.

        `accuracy` counts the correct ones during training.
        """
        logits = self._logits(model, batch)
        if self.criterion is None:
            total = F.cross_entropy(
                logits, batch["label"], reduction="sum", label_smoothing=self.label_smoothing
            )
        else:
            label = batch["label"]
            if self.label_smoothing:
                label = (1.0 - self.label_smoothing) * shares(
                    label, logits
                ) + self.label_smoothing / logits.shape[1]
            total = self._each(self.criterion, logits, label).sum()
        return Loss(
            total, count=len(logits), parts={"accuracy": _hits(logits.detach(), batch["label"])}
        )

    def measure(self, model: nn.Module, batch: Batch) -> MeasuredClassification:
        logits = self._mean_logits(model, batch)
        probabilities, prediction = self._probabilities(logits), logits.argmax(1)
        given, several = batch["label"], self._separate and batch["label"].dim() == 2
        first = (
            logits.where(given == given.amax(1, keepdim=True), -torch.inf).argmax(1)
            if several
            else prediction
        )
        label = given if given.dim() == 1 else _likeliest_label(given, first)
        loss = (
            F.cross_entropy(logits, batch["label"], reduction="none")
            if self.criterion is None
            else self._each(self.criterion, logits, batch["label"])
        )
        shown = _worth_seeing(loss)
        return MeasuredClassification(
            loss=loss.cpu(),
            label=label.cpu(),
            prediction=prediction.cpu(),
            rank=_rank(logits, label).cpu(),
            confidence=probabilities.max(1).values.cpu(),
            num_classes=logits.shape[1],
            shown=shown.cpu(),
            thumbnails=pictures.thumbnails(batch["image"][shown]).cpu(),
            probabilities=probabilities.cpu() if self.metrics else None,
            labels=given.cpu() if several else None,
        )

    def scores(self, dataset: Any) -> ClassificationScores:
        return ClassificationScores(
            classes=class_names(dataset), top_k=self.top_k, metrics=self.metrics
        )

    def read(self, file: Path) -> dict[str, Any]:
        """An image, or the middle of a video if the recipe was trained on clips.

        With a placeholder label.
        """
        if frames := self._frames:
            image = read_frames(
                file, partial(clip_frames, frames=frames, stride=self._stride, start=centre)
            )
        elif self._as_stored:
            image = read_channels(file, self.channels)
        else:
            image = self._read_image(file, mode="gray" if self.channels == 1 else "rgb")
        return {"image": image, "label": 0, "file": str(file)}

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        probabilities = self._probabilities(self._mean_logits(model, batch)).cpu()
        drawn = (
            [partial(self._picture, file) for file in batch["file"]]
            if self.takes == "images"
            else [None] * len(probabilities)
        )
        return [
            Classified(each, self.classes, picture, separate=self._separate)
            for each, picture in zip(probabilities, drawn, strict=True)
        ]

    def _picture(self, file: str) -> Tensor:
        """uint8[3, H, W], to draw a class into.

        Of stored channels the first three, or the only one, stretched to their range.
        """
        if not self._as_stored:
            return self._read_image(file)
        return pictures.thumbnails(read_channels(Path(file), self.channels)[None], longest=1280)[
            0
        ].expand(3, -1, -1)

    def inputs(self, batch: Batch) -> Tensor:
        """The model's input."""
        return (
            batch["image"] if isinstance(batch["image"], Tensor) else stack_images(batch["image"])
        )

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """float32[B, K]: the model's output, checked.

        Shapes are compared at every call, values at most once, since that waits for the device.
        """
        output = model(self.inputs(batch))
        if not isinstance(output, Tensor) or output.dim() != 2:
            form = (
                f"a tensor {list(output.shape)}"
                if isinstance(output, Tensor)
                else type(output).__name__
            )
            has_more = hasattr(output, "aux_logits") or hasattr(output, "aux_logits1")
            hint = (
                "auxiliary outputs are not trained: model.aux_logits=false"
                if has_more
                else none_hint(output)
            )
            raise ConfigError(
                Problem(
                    "model",
                    "does not return one row of logits for each image",
                    form,
                    "a tensor [batch, classes]",
                    hint,
                )
            )
        if self.num_classes is not None and output.shape[1] != self.num_classes:
            reason = f"has {output.shape[1]} outputs, but the recipe has {self.num_classes} classes"
            has_setting = any(
                "num_classes" in inspect.signature(type(part).__init__).parameters
                for part in model.modules()
            )
            hint = (
                "set model.num_classes=${dataset.num_classes}"
                if has_setting
                else f"give the model {self.num_classes} outputs"
            )
            raise ConfigError(Problem("model", reason, hint=hint))
        if batch["label"].dim() == 2 and batch["label"].shape[1] != output.shape[1]:
            words = (
                f"a label has {batch['label'].shape[1]} numbers, but the model has "
                f"{output.shape[1]} outputs"
            )
            hint = (
                "the same num_classes for the data, the model, and MixUp or CutMix in "
                "transforms.train.batch: ${dataset.num_classes}"
            )
            raise ConfigError(Problem("model, dataset, transforms", words, hint=hint))
        if not self._range_is_known and batch["label"].dim() == 1:
            _check_range(
                batch["label"], output.shape[1], f"the model has {output.shape[1]} outputs"
            )
            self._range_is_known = True
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def _mean_logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """float32[B, K]: the mean over each image's versions."""
        if self._views == "none":
            return self._logits(model, batch)
        return torch.stack(
            [
                weight * self._logits(model, {**batch, "image": image})
                for weight, image in views(batch["image"], self._views)
            ]
        ).sum(0)

    def _probabilities(self, logits: Tensor) -> Tensor:
        """float[B, K], by the loss's link.

        A sigmoid in float64, since in float32 all logits from 17 on become 1.
        """
        return logits.cpu().double().sigmoid() if self._separate else logits.softmax(1)

    def _each(self, criterion: nn.Module, logits: Tensor, label: Tensor) -> Tensor:
        """float32[B]: each image's loss, with its shape checked."""
        with torch.autocast(logits.device.type, enabled=False):
            each = criterion(logits, label)
        if not isinstance(each, Tensor) or each.shape != logits.shape[:1]:
            form = (
                f"a tensor {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            )
            classes = isinstance(each, Tensor) and each.shape == logits.shape
            fitting = (
                "the sum or mean over the classes, as loss=bce or mse gives"
                if classes
                else "torch's own losses need reduction: none"
            )
            hint = f"{fitting}; `samewise list loss` shows those that fit"
            raise ConfigError(
                Problem(
                    "recipe.loss",
                    "does not give one loss for each image",
                    form,
                    f"a tensor [{len(logits)}]",
                    hint,
                )
            )
        return each

    def labels(self, labels: Sequence[Any]) -> Tensor:
        """int64[B] or float32[B, K] of the samples' labels.

        Raises:
            DataError: one is out of range, is no label, or is one that the loss cannot take.
        """
        try:
            kinds = set(map(type, labels))  # one is the usual case, and the fast one
            made = (
                torch.tensor(labels)
                if kinds == {int}
                else torch.stack(
                    list(labels) if kinds == {Tensor} else list(map(torch.as_tensor, labels))
                )
            )
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                Problem(
                    "dataset",
                    "labels are not numbers of one type",
                    labels[0],
                    "an integer, or one float for each class",
                )
            ) from None
        if made.dim() == 1 and not made.is_floating_point():
            made = made.long()
            if self.num_classes is not None:
                _check_range(made, self.num_classes, f"there are {self.num_classes} classes")
        elif made.dim() != 2 or not made.is_floating_point():
            raise DataError(
                Problem(
                    "dataset",
                    "labels are not valid classes",
                    labels[0],
                    "an integer, or one float for each class",
                )
            )
        self._require_shares(made)
        return made

    def _require_shares(self, labels: Tensor) -> None:
        """Raise a DataError if a cross-entropy is given rows that do not add up to 1: it would
        count an image as often as it has labels.
        """
        if not self._of_shares or labels.dim() != 2:
            return
        sums = labels.double().sum(1)
        if len(wrong := (~((sums - 1.0).abs() <= _ROUNDING)).nonzero()):
            words = (
                f"a label's numbers add up to {float(sums[wrong[0]]):g}, and a cross-entropy "
                "takes shares that add up to 1"
            )
            hint = "loss=bce takes any number of labels for each image, as zeros and ones"
            raise DataError(
                Problem(
                    "dataset",
                    words,
                    labels[wrong[0, 0]].tolist(),
                    "one class, or its share for each class",
                    hint,
                )
            )


_ROUNDING = 0.05
"""What the sum of an image's shares of classes may be off by."""


@final
class Classified(Prediction):
    """The predicted class of an image.

    Args:
        probabilities: float[K].
        classes: Their K names, or none.
        picture: Reads the image to draw it in, uint8[3, H, W]; None: there is none.
        least: Classes that are less probable are left out; None: none.
        separate: The image may have several classes: all that are not less probable than `least`
            are found.
    """

    def __init__(
        self,
        probabilities: Tensor,
        classes: Sequence[str] = (),
        picture: Callable[[], Tensor] | None = None,
        *,
        least: float | None = None,
        separate: bool = False,
    ) -> None:
        self.probabilities = probabilities
        self.classes = list(classes) if len(classes) == len(probabilities) else []
        self._picture = picture
        self._least = least or 0.0
        self._separate = separate
        self._every = separate and least is not None

    def values(self) -> dict[str, Any]:
        """The likeliest class, by number and, if known, name, and the probabilities of those found.

        None if all are below the threshold.
        """
        found = self._found()
        return {
            **self._named(found[0] if found else None),
            "probabilities": {
                self._name(label): float(self.probabilities[label]) for label in found
            },
        }

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `NAME_class.png`, the image with its class and probability; nothing for videos."""
        if self._picture is None:
            return []
        words = (
            ", ".join(f"{self._name(one)} {self.probabilities[one]:.2f}" for one in self._shown())
            or f"none of at least {self._least:g}"
        )
        return [pictures.save_classified(folder / f"{name}_class.png", self._picture(), words)]

    def rows(self) -> list[dict[str, Any]]:
        """One row, with the `probability` of the class.

        Of an image that may have several, one for each that reaches the threshold.
        """
        return [
            {
                **self._named(one),
                "probability": None if one is None else float(self.probabilities[one]),
            }
            for one in self._shown() or [None]
        ]

    def at_least(self, score: float) -> Classified:
        return Classified(
            self.probabilities, self.classes, self._picture, least=score, separate=self._separate
        )

    def _found(self) -> list[int]:
        """The five likeliest classes that reach the threshold, or all that do."""
        ranked = self.probabilities.argsort(descending=True, stable=True).tolist()
        return [
            one
            for one in (ranked if self._every else ranked[:5])
            if self.probabilities[one] >= self._least
        ]

    def _shown(self) -> list[int]:
        return self._found()[: None if self._every else 1]

    def _named(self, label: int | None) -> dict[str, Any]:
        return {
            "label": label,
            **({"class": None if label is None else self.classes[label]} if self.classes else {}),
        }

    def _name(self, label: int) -> str:
        """Distinct for each class: some data sets use a name twice."""
        if not self.classes:
            return str(label)
        name = self.classes[label]
        return name if self.classes.count(name) == 1 else f"{name} ({label})"


def _check_range(labels: Tensor, classes: int, reason: str) -> None:
    """One pass over B integers; a wrong one is located only if there is one."""
    low, high = (int(end) for end in torch.aminmax(labels))
    if low < 0 or high >= classes:
        reason, value, expected = (
            f"the label is out of range: {reason}",
            int(labels[(labels < 0) | (labels >= classes)][0]),
            f"0 to {classes - 1}",
        )
        hint = "set dataset.num_classes to the number of classes, counted from 0"
        raise DataError(Problem("dataset", reason, value, expected, hint))


def _hits(logits: Tensor, label: Tensor) -> Tensor:
    """int64[]: for how many images the largest logit belongs to the label, or to the likeliest
    label.
    """
    prediction = logits.argmax(1)
    return (
        prediction == (label if label.dim() == 1 else _likeliest_label(label, prediction))
    ).sum()


def _likeliest_label(labels: Tensor, prediction: Tensor) -> Tensor:
    """int64[B]: the largest of labels float[B, K].

    Of several, the predicted one, since the image shows it.
    """
    best, first = labels.max(1)
    return torch.where(
        (labels.gather(1, prediction[:, None])[:, 0] == best) & (best > 0), prediction, first
    )


def _rank(logits: Tensor, label: Tensor) -> Tensor:
    """int64[B]: the number of classes ranked before the true one, by larger logit, then by lower
    number.

    Unlike `topk`, whose choice among equal logits is not specified, this is one answer on every
    device; it is 0 exactly where `argmax` is right. A logit that is not a number counts as larger,
    so a model that gives nothing else is never right.
    """
    true = logits.gather(1, label[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < label[:, None]
    return (~(logits <= true) | ((logits == true) & earlier)).sum(1)


def _worth_seeing(loss: Tensor, *, worst: int = 4, first: int = 4) -> Tensor:
    """int64[S]: the batch's positions with the largest loss, and its first few."""
    chosen = torch.zeros_like(loss, dtype=torch.bool)
    chosen[loss.argsort(descending=True, stable=True)[:worst]] = True
    chosen[:first] = True
    return chosen.nonzero().flatten()
