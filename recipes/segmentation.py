"""Semantic segmentation: a class for each pixel, mean IoU and pixel accuracy.

On CUDA, torch's two-dimensional cross-entropy has no deterministic kernel, so pixels are rows here.
Bilinear resizing has a slower backward there that keeps its bits, which torch chooses itself.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import tv_tensors

from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.folders import IMAGES
from samewise.datasets.parts.masks import IGNORED
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.labelled_images import stack_images
from samewise.recipes.parts.losses import is_sigmoid
from samewise.recipes.parts.named_metrics import NamedMetrics
from samewise.recipes.parts.pictures import thumbnails
from samewise.recipes.parts.segmentation_scores import MeasuredSegmentation, SegmentationScores
from samewise.recipes.parts.segmented import Segmented
from samewise.runner.errors import ConfigError, DataError, Problem, none_hint
from samewise.runner.interfaces import Batch, Form, Loss, Phase, Prediction, Recipe, class_names


class Segmentation(Recipe):
    """Segmentation; batches have `image`, `mask` and `pixels`.

    A batch is `{"image": float32[B, 3, H, W], "mask": uint8[B, H, W], "pixels": list of int}`, or
    has lists of images and masks that differ in size, which only evaluations accept. Pixels of a
    mask are labels from 0, or 255 where they do not count; `pixels` has the number of those that
    count in each image. A batch transform that changes this number must change the entry.

    The model is one of torchvision's, or has their interface: `model(images)` returns logits
    float[B, K, H, W], or a dict with these as `out` and perhaps those of an auxiliary classifier as
    `aux`.

    Args:
        num_classes: Number of labels, K, with the background if it is one.
        aux_weight: The weight of the auxiliary classifier's loss, in training.
        loss: A module from logits float32[P, K] and labels int64[P] to each pixel's loss, float[P]
            (`parts.losses`); None: cross-entropy.
        metrics: Further metrics of an evaluation over pixels, by name (`parts.named_metrics`).
        shown: Number of an evaluation's images that are drawn with their masks.

    Raises:
        ConfigError: There are fewer than 2 classes or more than 255.
    """

    gives = (
        "a row of scores for each class and pixel of an image; the largest gives the pixel's class"
    )
    takes = "images"
    extensions = IMAGES
    export_samples = 1

    def __init__(
        self,
        *,
        num_classes: int,
        aux_weight: float = 0.5,
        loss: nn.Module | None = None,
        metrics: Mapping[str, Any] | None = None,
        shown: int = 8,
    ) -> None:
        ConfigError.raise_if(
            not 2 <= num_classes <= IGNORED,
            "recipe.num_classes",
            "is not a valid number of classes",
            num_classes,
            "2 to 255",
        )
        self.num_classes, self.aux_weight, self.shown = num_classes, aux_weight, shown
        self.criterion, self._separate = loss, is_sigmoid(loss)
        self.metrics = NamedMetrics(metrics, taken=["loss", "miou", "pixel_accuracy"])

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate samples with `image` and `mask`; other keys become lists.

        Raises:
            DataError: A sample has another form, or a label is out of range.
        """
        records = [self._record(sample) for sample in samples]
        batch = {name: [record[name] for record in records] for name in records[0]}
        is_one_size = len({image.shape for image in batch["image"]}) == 1
        stacked = {name: torch.stack(batch[name]) for name in ("image", "mask") if is_one_size}
        return {**batch, **stacked, "pixels": [int((x != IGNORED).sum()) for x in batch["mask"]]}

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the loss summed over the pixels that count, in float32 for any precision.

        The auxiliary classifier's is added with its weight; both are parts then.
        """
        images, masks = stack_images(batch["image"]), stack_images(batch["mask"])
        losses = {
            name: self._pixel_losses(logits, masks).sum()
            for name, logits in self._outputs(model, images).items()
        }
        total = losses["out"]
        if "aux" in losses:
            total = total + self.aux_weight * losses["aux"]
        return Loss(
            total,
            count=sum(batch["pixels"]),
            parts={name: part.detach() for name, part in losses.items()} if len(losses) > 1 else {},
        )

    def measure(self, model: nn.Module, batch: Batch) -> MeasuredSegmentation:
        losses, shown, likely = list[float](), list[Tensor](), list[tuple[Tensor, Tensor]]()
        confusion = torch.zeros(self.num_classes**2, dtype=torch.int64)
        for images, masks in _of_one_size(batch):
            logits = self._outputs(model, images)["out"]
            losses += self._pixel_losses(logits, masks).double().sum((1, 2)).tolist()
            predicted, counts = logits.argmax(1), masks != IGNORED
            confusion += (
                (masks[counts].long() * self.num_classes + predicted[counts])
                .bincount(minlength=len(confusion))
                .cpu()
            )
            if self.metrics:
                activated = logits.sigmoid() if self._separate else logits.softmax(1)
                rows = activated.movedim(1, -1)[counts]
                likely.append((rows.cpu(), masks[counts].long().cpu()))
            for row in zip(images, masks, predicted, strict=True):
                shown += [_small(*row)] if len(shown) < self.shown else []
        confusion = confusion.view(self.num_classes, self.num_classes)
        return MeasuredSegmentation(losses, batch["pixels"], confusion, shown, likely)

    def scores(self, dataset: Any) -> SegmentationScores:
        return SegmentationScores(
            names=class_names(dataset),
            num_classes=self.num_classes,
            shown=self.shown,
            metrics=self.metrics,
        )

    def read(self, file: Path) -> dict[str, Any]:
        """Read an image, with its size as `file_size` and a mask of pixels that do not count."""
        image = read_image(file)
        size = (image.shape[-2], image.shape[-1])
        # torchvision's transforms move both
        return {
            "image": tv_tensors.Image(image),
            "mask": tv_tensors.Mask(torch.full(size, IGNORED, dtype=torch.uint8)),
            "file_size": size,
            "file": str(file),
        }

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        logits = [
            x for images, _ in _of_one_size(batch) for x in self._outputs(model, images)["out"]
        ]
        return [
            # Enlarged before the largest is chosen, so that borders are smooth
            Segmented(
                F.interpolate(x[None], size, mode="bilinear")[0].argmax(0), file, self.classes
            )
            for x, size, file in zip(logits, batch["file_size"], batch["file"], strict=True)
        ]

    def forms(self, model: nn.Module, batch: Batch) -> Mapping[str, Form]:
        """Return the form from an image [1, 3, H, W] to its logits, float32[1, K, H, W]."""
        return {
            "": Form(
                lambda model, image: {"logits": self._outputs(model, image)["out"]},
                {"image": batch["image"]},
            )
        }

    def _outputs(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """Return the model's logits by name, float32[B, K, H, W] each, checked."""
        output = model(images)
        outputs = output if isinstance(output, Mapping) else {"out": output}
        expected, main = [len(images), self.num_classes, *images.shape[-2:]], outputs.get("out")
        if not isinstance(main, Tensor) or list(main.shape) != expected:
            raise ConfigError(
                Problem(
                    "model",
                    "does not return logits for each pixel",
                    form_of(output if main is None else main),
                    f"a tensor {expected}, or a dict with it as `out`",
                    none_hint(output),
                )
            )
        return {
            name: logits.to(torch.promote_types(logits.dtype, torch.float32))
            for name, logits in outputs.items()
        }

    def _pixel_losses(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Return each pixel's loss, float[B, H, W], 0 where it does not count."""
        rows, labels = logits.movedim(1, -1).flatten(0, 2), masks.flatten().long()
        if self.criterion is None:
            losses = F.cross_entropy(rows, labels, ignore_index=IGNORED, reduction="none")
        else:
            counts = labels != IGNORED
            losses = self.criterion(rows, labels.where(counts, 0)).where(counts, 0.0)
        return losses.view(masks.shape)

    def _record(self, sample: Any) -> dict[str, Any]:
        if not isinstance(sample, Mapping) or not {"image", "mask"} <= sample.keys():
            raise DataError(
                Problem(
                    "dataset",
                    "a sample is not an image with a mask",
                    form_of(sample),
                    "a dict with `image` and `mask`",
                )
            )
        # A batch shares no memory with the data set
        record = {
            name: value.as_subclass(Tensor).clone() if isinstance(value, Tensor) else value
            for name, value in sample.items()
        }
        image, mask = record["image"], record["mask"]
        if mask.shape != image.shape[-2:] or mask.is_floating_point():
            raise DataError(
                Problem(
                    "dataset",
                    "a mask does not fit its image",
                    f"{mask.dtype}{list(mask.shape)}",
                    f"whole numbers {list(image.shape[-2:])}",
                )
            )
        if len(wrong := mask[(mask != IGNORED) & ((mask < 0) | (mask >= self.num_classes))]):
            raise DataError(
                Problem(
                    "dataset",
                    "a mask has a label out of range",
                    int(wrong[0]),
                    f"0 to {self.num_classes - 1}, or 255 where a pixel does not count",
                    f"set dataset.num_classes={int(wrong.max()) + 1}",
                )
            )
        return record


def _of_one_size(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Return images and masks, all at once if they are of one size, else one by one."""
    images, masks = batch["image"], batch["mask"]
    if isinstance(images, Tensor):
        return [(images, masks)]
    return [(image[None], mask[None]) for image, mask in zip(images, masks, strict=True)]


def _small(image: Tensor, *maps: Tensor) -> Tensor:
    """Return uint8[5, h, w]: a small image, its true labels, and those of the model."""
    small = thumbnails(image[None], longest=320)[0].expand(3, -1, -1)
    stacked = torch.stack([x.to(torch.uint8) for x in maps])[None]
    return torch.cat([small, F.interpolate(stacked, small.shape[-2:])[0]]).cpu()
