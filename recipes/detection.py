"""Object detection: boxes and classes, the losses of torchvision's detectors, COCO's average
precision.

What is deterministic: everything on the CPU. On CUDA, by torch's and torchvision's sources: the
focal, L1 and IoU losses, indexing and its backward (sorted under deterministic algorithms), the
pyramid's nearest interpolation and its backward, non-maximum suppression (a stable sort, then bit
masks without atomics). Bilinear resizing has no deterministic backward there, but images need no
gradient. RoIAlign's backward (of Faster R-CNN, not of RetinaNet) has none either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.transforms.v2 import functional

from samewise.datasets.parts.annotated_images import annotated_sample, require_whole, size_before
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.folders import IMAGES
from samewise.recipes.parts.average_precision import Image
from samewise.recipes.parts.detected import Detected
from samewise.recipes.parts.detection_scores import DetectionScores, MeasuredDetection
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.pictures import thumbnails
from samewise.runner.errors import ConfigError, DataError, Problem, none_hint
from samewise.runner.interfaces import Batch, Form, Loss, Phase, Prediction, Recipe, class_names


@final
class Detection(Recipe):
    """Batches are `{"image": list of B tensors [3, H, W], or one tensor, "boxes": list of
    float32[N, 4], "labels": list of int64[N], "image_id": list of int}`.

    Boxes are (x1, y1, x2, y2) in pixels of their image, labels count from 1. In evaluation,
    `file_size`, a list of (height, width), is what images had before they were resized: results are
    in those pixels, as is `area`, a list of float32[N]. The model is one of torchvision's
    detectors, or has their interface: in training `model(images, targets)` gives a dict of losses,
    each a mean over the images; in evaluation `model(images)` gives a list of `{"boxes", "labels",
    "scores"}`. Images reach it as floats in [0, 1]; it normalises and resizes them itself.

    Under autocast (precision=bf16 or fp16) RetinaNet's anchors, boxes and losses are float32. Other
    detectors are evaluated without autocast, as in torchvision's references/detection:
    torchvision's would decode and suppress boxes in the low format. In training theirs are in that
    format, as there.

    Args:
        num_classes: With the background (label 0), to find a label out of range in the loader's
            worker; None: any label from 1.
        shown: How many images of an evaluation are drawn with their boxes.
    """

    gives = (
        "boxes (x1, y1, x2, y2) in pixels of the input, their labels, counted from 1, and "
        "their scores; for a module of the model, that module's output"
    )
    takes = "images"
    extensions = IMAGES
    export_samples = 1

    def __init__(self, *, num_classes: int | None = None, shown: int = 12) -> None:
        if num_classes is not None and num_classes < 2:
            raise ConfigError(
                Problem(
                    "recipe.num_classes",
                    "is too small",
                    num_classes,
                    "at least 2, because the background is a class",
                )
            )
        self.num_classes = num_classes
        self.shown = shown

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate samples with `image`, `boxes` and `labels`.

        Other keys become lists. Boxes without area, which crops can leave, are removed.

        Raises: DataError: a sample of another form, an inverted box, one outside of its image, or a
            label out of range.
        """
        records = [self._record(sample) for sample in samples]
        images = [record["image"] for record in records]
        same = len({image.shape for image in images}) == 1
        columns = {
            name: [record[name] for record in records] for name in records[0] if name != "image"
        }
        return {"image": torch.stack(images) if same else images, **columns}

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """The sum of each image's loss over the B images.

        The step's loss is their mean, as torchvision's.

        Images of different sizes are padded to the largest of their micro-batch, and the padding
        counts: as background, and in norms over an image. Divided into other micro-batches, they
        give a somewhat different loss.

        For RetinaNet an image's loss is its focal loss, summed over anchors and classes, plus its
        box loss, summed over its foreground anchors, both over their number (Lin et al. 2017, arXiv
        1708.02002, section 4.1).
        """
        images = _floats(batch["image"])
        with _anchors_kept(model, images[0].device):
            losses: Mapping[str, Tensor] = model(images, _targets(batch))
        if not isinstance(losses, Mapping) or not losses:
            words = "does not return a dict of losses in training"
            raise ConfigError(
                Problem(
                    "model",
                    words,
                    type(losses).__name__,
                    "a detector with torchvision's interface",
                    none_hint(losses),
                )
            )
        parts = {name: loss.float() * len(images) for name, loss in losses.items()}
        total = torch.stack(list(parts.values())).sum()
        return Loss(
            total,
            count=len(images),
            parts={_short(name): part.detach() for name, part in parts.items()}
            if len(parts) > 1
            else {},
        )

    def measure(self, model: nn.Module, batch: Batch) -> MeasuredDetection:
        images, targets, losses = _floats(batch["image"]), _targets(batch), dict[str, float]()

        def detect(places: list[int]) -> list[Mapping[str, Tensor]]:
            some = [images[place] for place in places]
            if not _gives_both(model):
                return _detect(model, some)
            means, found = model.losses_and_detections(some, [targets[place] for place in places])
            for name, mean in means.items():
                losses[_short(name)] = losses.get(_short(name), 0.0) + float(mean) * len(places)
            return found

        measured = [
            _image(batch, place, found) for place, found in enumerate(_at_own_size(images, detect))
        ]
        small = [thumbnails(image[None], longest=320)[0].cpu() for image in images[: self.shown]]
        return MeasuredDetection(measured, losses, small)

    def scores(self, dataset: Any) -> DetectionScores:
        names = class_names(dataset)
        return DetectionScores(
            names=names, num_classes=self.num_classes or len(names), shown=self.shown
        )

    def read(self, file: Path) -> dict[str, Any]:
        """An image, without boxes, with its size as `file_size`.

        Where the data set resizes images, of that size.
        """
        image = read_image(file)
        read = (
            image
            if self.read_size is None
            else functional.resize(image, list(self.read_size), antialias=True)
        )
        sample = annotated_sample(
            read, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), number=0
        )
        return {**sample, **size_before(read, (image.shape[-2], image.shape[-1]))}

    def predict(self, model: nn.Module, batch: Batch) -> list[Prediction]:
        images = _floats(batch["image"])
        found = _at_own_size(
            images, lambda places: _detect(model, [images[place] for place in places])
        )
        return [
            Detected(_image(batch, place, one), image.cpu(), self.classes, self.category_ids)
            for place, (image, one) in enumerate(zip(images, found, strict=True))
        ]

    def forms(self, model: nn.Module, batch: Batch) -> Mapping[str, Form]:
        """For one image [1, 3, H, W]: boxes float32[N, 4], labels int64[N] and scores float32[N],
        by descending score.
        """
        return {"": Form(_detect_in_one, {"image": batch["image"]})}

    def _record(self, sample: Any) -> dict[str, Any]:
        if not isinstance(sample, Mapping) or not {"image", "boxes", "labels"} <= sample.keys():
            raise DataError(
                Problem(
                    "dataset",
                    "a sample is not an image with boxes",
                    form_of(sample),
                    "a dict with `image`, `boxes` and `labels`",
                )
            )
        # plain tensors: the subclasses of tv_tensors would slow down every operation that follows;
        # copies, since a batch shares no memory with the data set
        record = {
            name: value.as_subclass(Tensor).clone() if isinstance(value, Tensor) else value
            for name, value in sample.items()
        }
        image, boxes, labels = record["image"], record["boxes"], record["labels"]
        where = f"image {record['image_id']}" if "image_id" in record else "the image"
        if not isinstance(image, Tensor) or image.dim() != 3:
            raise DataError(
                Problem(
                    "dataset",
                    f"{where} is not a tensor",
                    type(image).__name__,
                    "a tensor [3, height, width]",
                )
            )
        if boxes.dim() != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
            raise DataError(
                Problem(
                    "dataset",
                    f"{where} has boxes {list(boxes.shape)} and labels {list(labels.shape)}",
                    expected="[N, 4] and [N]",
                )
            )
        if "probe" in record:
            require_whole(image, record.pop("probe"))
        self._check_values(boxes, labels, image, where)
        solid = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        per_box = {
            name: value[solid]
            for name, value in record.items()
            if name in ("boxes", "labels", "crowd", "area")
        }
        per_box["boxes"] = per_box["boxes"].to(torch.float32)
        return {**record, **per_box}

    def _check_values(self, boxes: Tensor, labels: Tensor, image: Tensor, where: str) -> None:
        if not len(boxes):
            return
        height, width = image.shape[-2:]
        bound = torch.tensor([width, height, width, height])
        wrong = (
            (boxes[:, 2:] < boxes[:, :2]).any(1)
            | (boxes < -0.5).any(1)
            | (boxes > bound + 0.5).any(1)
            | ~boxes.isfinite().all(1)
        )
        if wrong.any():
            box = [round(value, 2) for value in boxes[wrong][0].tolist()]
            raise DataError(
                Problem(
                    "dataset",
                    f"{where} of {width} x {height} pixels has an impossible box",
                    box,
                    "x1 < x2 and y1 < y2, within the image",
                )
            )
        end = self.num_classes if self.num_classes is not None else math.inf
        if int(labels.min()) < 1 or int(labels.max()) >= end:
            label = next(one for one in labels.tolist() if not 1 <= one < end)
            hint = "dataset.num_classes counts the background, label 0"
            raise DataError(
                Problem(
                    "dataset", f"{where} has a label out of range", label, f"1 to {end - 1}", hint
                )
            )


def _floats(images: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """B tensors float[3, H, W] in [0, 1]."""
    if images[0].is_floating_point():
        return list(images)
    return [image.to(torch.float32) / 255 for image in images]


def _gives_both(model: nn.Module) -> bool:
    """Whether the model is ours, or one like it: it gives losses and detections in one pass, and
    cares for their number format itself.
    """
    return hasattr(model, "losses_and_detections")


def _detect(model: nn.Module, images: list[Tensor]) -> list[Mapping[str, Tensor]]:
    """Detections, without autocast in a model that would decode them in its format."""
    if _gives_both(model):
        return model(images)
    with torch.autocast(images[0].device.type, enabled=False):
        return model(images)


@contextmanager
def _anchors_kept(model: nn.Module, device: torch.device) -> Generator[None]:
    """Restore, after a pass under autocast, the anchors that torchvision's generators keep as
    rounded as the features: evaluations would depend on it.
    """
    generators = list[AnchorGenerator]()
    if torch.is_autocast_enabled(device.type) and not _gives_both(model):
        generators = [module for module in model.modules() if isinstance(module, AnchorGenerator)]
    for generator in generators:
        generator.set_cell_anchors(torch.float32, device)
    anchors = [generator.cell_anchors for generator in generators]
    yield
    for generator, kept in zip(generators, anchors, strict=True):
        generator.cell_anchors = kept


def _detect_in_one(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    (found,) = model(_floats(image))
    return {name: found[name] for name in ("boxes", "labels", "scores")}


def _targets(batch: Batch) -> list[dict[str, Tensor]]:
    crowds = batch.get("crowd") or [None] * len(batch["boxes"])
    return [
        {"boxes": boxes, "labels": labels}
        if crowd is None
        else {"boxes": boxes[~crowd], "labels": labels[~crowd]}
        for boxes, labels, crowd in zip(batch["boxes"], batch["labels"], crowds, strict=True)
    ]


def _at_own_size(
    images: Sequence[Tensor], detect: Callable[[list[int]], list[Mapping[str, Tensor]]]
) -> list[Mapping[str, Tensor]]:
    """What `detect` finds in each image, called with the places of those of one size: padded to the
    largest image of a batch, others give other results.
    """
    places, found = dict[torch.Size, list[int]](), dict[int, Mapping[str, Tensor]]()
    for place, image in enumerate(images):
        places.setdefault(image.shape, []).append(place)
    for some in places.values():
        found |= zip(some, detect(some), strict=True)
    return [found[place] for place in range(len(images))]


def _image(batch: Batch, place: int, found: Mapping[str, Tensor]) -> Image:
    """An image's boxes and detections, in pixels of the file if its size is known."""
    height, width = batch["image"][place].shape[-2:]
    size: tuple[int, int] = (
        tuple(batch["file_size"][place]) if "file_size" in batch else (height, width)
    )
    scale = torch.tensor([size[1] / width, size[0] / height] * 2)
    boxes = batch["boxes"][place].cpu() * scale
    return Image(
        size=size,
        boxes=boxes,
        labels=batch["labels"][place].cpu(),
        crowd=batch["crowd"][place].cpu()
        if "crowd" in batch
        else torch.zeros(len(boxes), dtype=torch.bool),
        area=batch["area"][place].cpu()
        if "area" in batch
        else (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]),
        found_boxes=found["boxes"].float().cpu() * scale,
        found_labels=found["labels"].cpu(),
        found_scores=found["scores"].float().cpu(),
    )


def _short(name: str) -> str:
    """A short name for one of torchvision's losses."""
    return {
        "bbox_regression": "boxes",
        "loss_box_reg": "boxes",
        "loss_classifier": "classification",
    }.get(name, name.removeprefix("loss_"))
