"""Image classification with cross-entropy or other losses, accuracy, and the confusion matrix.

Each image has one label, or any number of labels with losses that have a sigmoid for their link.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from samewise.datasets.parts.channels import read_channels, read_tensor
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.folders import IMAGES, TENSORS, VIDEOS
from samewise.datasets.parts.upright import read_upright
from samewise.datasets.parts.video_files import centre, clip_frames, read_frames
from samewise.recipes.parts import pictures
from samewise.recipes.parts.class_labels import (
    check_range,
    hits,
    labels_of,
    likeliest_label,
    rank,
    require_shares,
    worth_seeing,
)
from samewise.recipes.parts.classification_scores import (
    ClassificationScores,
    MeasuredClassification,
)
from samewise.recipes.parts.classified import Classified
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.labelled_images import as_record, collate_images, stack_images
from samewise.recipes.parts.losses import CrossEntropy, is_sigmoid, of_samples, shares
from samewise.recipes.parts.named_metrics import NamedMetrics
from samewise.recipes.parts.test_time import check_kind, views
from samewise.runner.errors import ConfigError, Problem, none_hint
from samewise.runner.interfaces import Batch, Loss, Phase, Prediction, Recipe, class_names


class Classification(Recipe):
    """Classification; batches are `{"image": float32[B, C, H, W], "label": int64[B]}`.

    MixUp and CutMix make the label float32[B, K]. Clips are float32[B, C, T, H, W].

    Args:
        num_classes: Number of classes, K. A label out of range is then found in the loader's
            worker. None: the first batch is checked against the model's outputs.
        label_smoothing: Share of the target that is spread evenly over all classes (arXiv
            1512.00567, section 7), in training only: evaluation reports the plain cross-entropy, so
            that losses can be compared between settings.
        top_k: The k of each reported top-k accuracy; only 1 and numbers below K are reported.
        channels: Channels of the images that `predict` reads: 1 is grey and 3 colour; any number
            with the modes "channels" and "tensors".
        reads: How `predict` reads files: `frames` of a video, None for images, and their `stride`;
            the `mode` of images, as in `datasets.parts.image_files.ImageFiles`; and whether they
            are turned `upright` (`datasets.parts.upright`).
        loss: A module from logits float32[B, K] and labels, int64[B] or float32[B, K], to each
            image's loss, float[B] (`parts.losses`), in training and in evaluation; None:
            cross-entropy. If its `link` is a sigmoid, labels float32[B, K] are zeros and ones, and
            each image has any number of labels.
        metrics: Further metrics of an evaluation, by name (`parts.named_metrics`).
        test_time_augmentation: `none`, `flip` or `flip_and_translate`: evaluate and predict by the
            mean of the logits of 1, 2 or 6 versions of each image (`parts.test_time`). An export
            has the model alone.

    Raises:
        ConfigError: An argument is not valid.
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
        ConfigError.raise_if(
            not 0.0 <= label_smoothing <= 1.0,
            "recipe.label_smoothing",
            "is not a valid share",
            label_smoothing,
            "a number from 0 to 1",
        )
        ConfigError.raise_if(
            any(k < 1 for k in top_k),
            "recipe.top_k",
            "is not a list of ranks",
            list(top_k),
            "whole numbers from 1",
        )
        self._mode = (reads or {}).get("mode")
        self._as_stored = self._mode in ("channels", "tensors")
        self._read_image = read_upright if (reads or {}).get("upright") else read_image
        ConfigError.raise_if(
            channels < 1 or (channels not in (1, 3) and not self._as_stored),
            "recipe.channels",
            "is not a valid number of image channels",
            channels,
            "1 (grey) or 3 (colour); or others if the data set has mode: channels",
        )
        self.channels = channels
        self._frames, self._stride = (reads or {}).get("frames"), (reads or {}).get("stride") or 1
        self.takes, self.extensions = ("videos", VIDEOS) if self._frames else ("images", IMAGES)
        if self._as_stored:
            self.extensions = TENSORS if self._mode == "tensors" else (*IMAGES, ".npy")
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
        self._teacher: nn.Module | None = None
        self._temperature, self._alpha = 1.0, 0.0

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate samples: dicts with `image` and `label`, or pairs of both, as in torchvision.

        An image is a tensor[C, H, W], a clip[T, C, H, W] or a vector[F] (unchanged), a PIL image or
        an array[H, W] or [H, W, C] (converted to uint8[C, H, W]). A label is an integer, or
        float[K], which for a cross-entropy adds up to 1. Images that the device decodes
        (`datasets.parts.encoded`) stay encoded.

        Raises:
            DataError: Images differ in size, a sample has another form, or the loss cannot take a
                label.
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
            check_range(batch["label"], self.num_classes, f"there are {self.num_classes} classes")
        if "label" in batch and self._of_shares and batch["label"].dim() == 2:
            require_shares(batch["label"])

    def labels(self, labels: Sequence[Any]) -> Tensor:
        """Return the samples' labels, int64[B] or float32[B, K].

        Raises:
            DataError: A label is invalid or out of range, or the loss cannot take it.
        """
        tensor = labels_of(labels, self.num_classes)
        if self._of_shares and tensor.dim() == 2:
            require_shares(tensor)
        return tensor

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the loss summed over the B images, in float32 for any precision.

        Its part `accuracy` counts the correct images during training.
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
            total = of_samples(self.criterion, logits, label).sum()
        parts = {"accuracy": hits(logits.detach(), batch["label"])}
        if self._teacher is not None:
            with torch.no_grad():
                taught = self._logits(self._teacher, batch)
            own, targets = ((x / self._temperature).log_softmax(1) for x in (logits, taught))
            distance = F.kl_div(own, targets, reduction="sum", log_target=True)
            parts["distillation"] = self._temperature**2 * distance.detach()
            total = (1 - self._alpha) * total + self._alpha * self._temperature**2 * distance
        return Loss(total, count=len(logits), parts=parts)

    def distil(self, teacher: nn.Module, *, temperature: float, alpha: float) -> None:
        """Add the divergence of softened outputs from the teacher's (Hinton et al. 2015, section 2).

        The loss is `(1 - alpha) * loss + alpha * temperature**2 * KL(teacher, model)`, the part
        `distillation` the last two factors.
        """
        ConfigError.raise_if(
            self._separate,
            "distil.teacher",
            "needs a softmax over the classes, which the recipe's loss does not have",
            expected="loss=cross_entropy",
        )
        self._teacher, self._temperature, self._alpha = teacher, temperature, alpha

    def measure(self, model: nn.Module, batch: Batch) -> MeasuredClassification:
        logits = self._mean_logits(model, batch)
        probabilities, prediction = self._probabilities(logits), logits.argmax(1)
        true_labels, is_multilabel = batch["label"], self._separate and batch["label"].dim() == 2
        # Of several true labels, the one that the model ranks first counts
        best = (
            logits.where(true_labels == true_labels.amax(1, keepdim=True), -torch.inf).argmax(1)
            if is_multilabel
            else prediction
        )
        label = true_labels if true_labels.dim() == 1 else likeliest_label(true_labels, best)
        loss = (
            F.cross_entropy(logits, batch["label"], reduction="none")
            if self.criterion is None
            else of_samples(self.criterion, logits, batch["label"])
        )
        shown = worth_seeing(loss)
        return MeasuredClassification(
            loss=loss.cpu(),
            label=label.cpu(),
            prediction=prediction.cpu(),
            rank=rank(logits, label).cpu(),
            confidence=probabilities.max(1).values.cpu(),
            num_classes=logits.shape[1],
            shown=shown.cpu(),
            thumbnails=self.thumbnails(batch, shown).cpu(),
            probabilities=probabilities.cpu() if self.metrics else None,
            labels=true_labels.cpu() if is_multilabel else None,
        )

    def thumbnails(self, batch: Batch, shown: Tensor) -> Tensor:
        """Return the samples at some positions of a batch, small, for pictures."""
        return pictures.thumbnails(batch["image"][shown])

    def scores(self, dataset: Any) -> ClassificationScores:
        return ClassificationScores(
            classes=class_names(dataset), top_k=self.top_k, metrics=self.metrics
        )

    def read(self, file: Path) -> dict[str, Any]:
        """Read an image, or a video's middle for recipes of clips, with a placeholder label."""
        image = (
            read_frames(
                file, partial(clip_frames, frames=frames, stride=self._stride, start=centre)
            )
            if (frames := self._frames)
            else self._read_stored(file)
            if self._as_stored
            else self._read_image(file, mode="gray" if self.channels == 1 else "rgb")
        )
        return {"image": image, "label": 0, "file": str(file)}

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        probabilities = self._probabilities(self._mean_logits(model, batch)).cpu()
        drawers = (
            [partial(self._picture, file) for file in batch["file"]]
            if self.takes == "images"
            else [None] * len(probabilities)
        )
        return [
            Classified(row, self.classes, picture, separate=self._separate)
            for row, picture in zip(probabilities, drawers, strict=True)
        ]

    def _picture(self, file: str) -> Tensor:
        """Return uint8[3, H, W], in which a class can be drawn.

        Of stored channels it shows the first three, or the only one, stretched to their range.
        """
        if not self._as_stored:
            return self._read_image(file)
        (picture,) = pictures.thumbnails(self._read_stored(file)[None], longest=1280)
        return picture.expand(3, -1, -1)

    def _read_stored(self, file: str | Path) -> Tensor:
        """Return a file's channels, or its tensor."""
        return read_tensor(file) if self._mode == "tensors" else read_channels(file, self.channels)

    def inputs(self, batch: Batch) -> Tensor:
        """Return the model's input."""
        return (
            batch["image"] if isinstance(batch["image"], Tensor) else stack_images(batch["image"])
        )

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's output, float32[B, K], checked."""
        output = model(self.inputs(batch))
        if not isinstance(output, Tensor) or output.dim() != 2:
            has_more = hasattr(output, "aux_logits") or hasattr(output, "aux_logits1")
            raise ConfigError(
                Problem(
                    "model",
                    "does not return one row of logits for each image",
                    form_of(output),
                    "a tensor [batch, classes]",
                    "auxiliary outputs are not trained: model.aux_logits=false"
                    if has_more
                    else none_hint(output),
                )
            )
        if self.num_classes is not None and output.shape[1] != self.num_classes:
            has_setting = any(
                "num_classes" in inspect.signature(type(part).__init__).parameters
                for part in model.modules()
            )
            raise ConfigError(
                Problem(
                    "model",
                    f"has {output.shape[1]} outputs, but the recipe has {self.num_classes} classes",
                    hint="set model.num_classes=${dataset.num_classes}"
                    if has_setting
                    else f"give the model {self.num_classes} outputs",
                )
            )
        if batch["label"].dim() == 2 and batch["label"].shape[1] != output.shape[1]:
            raise ConfigError(
                Problem(
                    "model, dataset, transforms",
                    f"a label has {batch['label'].shape[1]} numbers, but the model has "
                    f"{output.shape[1]} outputs",
                    hint="the same num_classes for the data, the model, and MixUp or CutMix in "
                    "transforms.train.batch: ${dataset.num_classes}",
                )
            )
        # Reading values waits for the device: once is enough
        if not self._range_is_known and batch["label"].dim() == 1:
            check_range(batch["label"], output.shape[1], f"the model has {output.shape[1]} outputs")
            self._range_is_known = True
        # float64 stays
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def _mean_logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean logits of each image's versions, float32[B, K]."""
        if self._views == "none":
            return self._logits(model, batch)
        return torch.stack(
            [
                weight * self._logits(model, {**batch, "image": image})
                for weight, image in views(batch["image"], self._views)
            ]
        ).sum(0)

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities by the loss's link, float[B, K]."""
        # In float32, the sigmoid of every logit from 17 on is 1
        return logits.cpu().double().sigmoid() if self._separate else logits.softmax(1)
