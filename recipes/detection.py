"""Object detection: boxes and classes, torchvision's losses, COCO's average precision.

Everything is deterministic on the CPU. On CUDA, by torch's and torchvision's sources, these are:
the focal, L1 and IoU losses, indexing and its backward (sorted under deterministic algorithms), the
pyramid's nearest interpolation and its backward, and non-maximum suppression (a stable sort, then
bit masks without atomics). Bilinear resizing has no deterministic backward there, but images need
no gradient. RoIAlign of Faster and Mask R-CNN has none either: under deterministic algorithms
torchvision computes it by torch's own operators, which takes more memory and time.

torchvision's samplers of proposals draw from torch's generators, which the runner keys by step and
micro-batch before it asks for the loss.
"""

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
from samewise.datasets.parts.masks import encode
from samewise.recipes.parts.average_precision import Image
from samewise.recipes.parts.detected import Detected
from samewise.recipes.parts.detection_scores import DetectionScores, MeasuredDetection
from samewise.recipes.parts.forms import form_of
from samewise.recipes.parts.pictures import thumbnails
from samewise.runner.errors import ConfigError, DataError, Problem, none_hint
from samewise.runner.interfaces import Batch, Form, Loss, Phase, Prediction, Recipe, class_names


@final
class Detection(Recipe):
    """Object detection; batches have `image`, `boxes`, `labels` and `image_id`.

    A batch is `{"image": list of B tensors [3, H, W], or one tensor, "boxes": list of float32[N,
    4], "labels": list of int64[N], "image_id": list of int}`. Boxes are (x1, y1, x2, y2) in pixels
    of their image, labels count from 1. In evaluation, `file_size`, a list of (height, width),
    holds the sizes of the images before they were resized: results are in those pixels, as is
    `area`, a list of float32[N]. For models with masks, such as Mask R-CNN, `masks` is a list of
    uint8[N, H, W].

    The model is one of torchvision's detectors, or has their interface: in training `model(images,
    targets)` returns a dict of losses, each a mean over the images; in evaluation `model(images)`
    returns a list of `{"boxes", "labels", "scores"}`. It takes images as floats in [0, 1], and
    normalises and resizes them itself.

    Under autocast (precision=bf16 or fp16), RetinaNet's anchors, boxes and losses are float32.
    Other detectors are evaluated without autocast, as in torchvision's references/detection:
    torchvision's would decode and suppress boxes in the low precision. They are trained in it, as
    there.

    Args:
        num_classes: Number of labels with the background (label 0): a label out of range is then
            found in the loader's worker. None: any label from 1.
        shown: Number of an evaluation's images that are drawn with their boxes.

    Raises:
        ConfigError: `num_classes` is less than 2.
    """

    gives = (
        "boxes (x1, y1, x2, y2) in pixels of the input, their labels, counted from 1, and "
        "their scores; for a module of the model, that module's output"
    )
    takes = "images"
    extensions = IMAGES
    export_samples = 1

    def __init__(self, *, num_classes: int | None = None, shown: int = 12) -> None:
        ConfigError.raise_if(
            num_classes is not None and num_classes < 2,
            "recipe.num_classes",
            "is too small",
            num_classes,
            "at least 2, because the background is a class",
        )
        self.num_classes = num_classes
        self.shown = shown

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate samples with `image`, `boxes` and `labels`; other keys become lists.

        Boxes without area, which crops can leave, are removed.

        Raises:
            DataError: A sample has another form, a box is inverted or outside its image, or a label
                is out of range.
        """
        records = [self._record(sample) for sample in samples]
        images = [record["image"] for record in records]
        is_one_size = len({image.shape for image in images}) == 1
        columns = {
            name: [record[name] for record in records] for name in records[0] if name != "image"
        }
        return {"image": torch.stack(images) if is_one_size else images, **columns}

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        """Return the sum of the B images' losses; the step's loss is their mean, as torchvision's.

        Images of different sizes are padded to the largest of their micro-batch, and the padding
        counts: as background, and in norms over an image. In other micro-batches, the loss differs
        slightly.

        RetinaNet's loss of an image is its focal loss, summed over anchors and classes, plus its
        box loss, summed over its foreground anchors, both divided by their number (Lin et al. 2017,
        arXiv 1708.02002, section 4.1).
        """
        images = _floats(batch["image"])
        with _anchors_kept(model, images[0].device):
            losses: Mapping[str, Tensor] = model(images, _targets(batch))
        if not isinstance(losses, Mapping) or not losses:
            raise ConfigError(
                Problem(
                    "model",
                    "does not return a dict of losses in training",
                    type(losses).__name__,
                    "a detector with torchvision's interface",
                    none_hint(losses),
                )
            )
        # The model's losses are means over the images
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
            x = [images[place] for place in places]
            if not _gives_both(model):
                return _detect(model, x)
            means, detections = model.losses_and_detections(x, [targets[place] for place in places])
            for name, mean in means.items():
                losses[_short(name)] = losses.get(_short(name), 0.0) + float(mean) * len(places)
            return detections

        measured = [
            _image(batch, place, detections)
            for place, detections in enumerate(_at_own_size(images, detect))
        ]
        return MeasuredDetection(
            measured,
            losses,
            [thumbnails(image[None], longest=320)[0].cpu() for image in images[: self.shown]],
        )

    def scores(self, dataset: Any) -> DetectionScores:
        names = class_names(dataset)
        return DetectionScores(
            names=names, num_classes=self.num_classes or len(names), shown=self.shown
        )

    def read(self, file: Path) -> dict[str, Any]:
        """Read an image without boxes, with its size as `file_size`.

        It is resized if the data set resizes images.
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
        detections = _at_own_size(
            images, lambda places: _detect(model, [images[place] for place in places])
        )
        return [
            Detected(_image(batch, place, x), image.cpu(), self.classes, self.category_ids)
            for place, (image, x) in enumerate(zip(images, detections, strict=True))
        ]

    def forms(self, model: nn.Module, batch: Batch) -> Mapping[str, Form]:
        """Return the form for one image [1, 3, H, W].

        It returns boxes float32[N, 4], labels int64[N] and scores float32[N], by descending score.
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
        # The subclasses of tv_tensors would slow down every further operation. A batch shares no
        # memory with the data set.
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
        # Crops can leave boxes without area, which have no box loss
        solid = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        per_box = {
            name: value[solid]
            for name, value in record.items()
            if name in ("boxes", "labels", "crowd", "area", "masks")
        }
        per_box["boxes"] = per_box["boxes"].to(torch.float32)
        return {**record, **per_box}

    def _check_values(self, boxes: Tensor, labels: Tensor, image: Tensor, where: str) -> None:
        if not len(boxes):
            return
        height, width = image.shape[-2:]
        bound = torch.tensor([width, height, width, height])
        # Half a pixel is left for rounding
        wrong = (
            (boxes[:, 2:] < boxes[:, :2]).any(1)
            | (boxes < -0.5).any(1)
            | (boxes > bound + 0.5).any(1)
            | ~boxes.isfinite().all(1)
        )
        if wrong.any():
            raise DataError(
                Problem(
                    "dataset",
                    f"{where} of {width} x {height} pixels has an impossible box",
                    [round(value, 2) for value in boxes[wrong][0].tolist()],
                    "x1 < x2 and y1 < y2, within the image",
                )
            )
        end = self.num_classes if self.num_classes is not None else math.inf
        if int(labels.min()) < 1 or int(labels.max()) >= end:
            raise DataError(
                Problem(
                    "dataset",
                    f"{where} has a label out of range",
                    next(x for x in labels.tolist() if not 1 <= x < end),
                    f"1 to {end - 1}",
                    "dataset.num_classes counts the background, label 0",
                )
            )


def _floats(images: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """Return B tensors float[3, H, W] in [0, 1]."""
    if images[0].is_floating_point():
        return list(images)
    return [image.to(torch.float32) / 255 for image in images]


def _gives_both(model: nn.Module) -> bool:
    """Whether the model returns losses and detections in one pass, and sets its own precision."""
    return hasattr(model, "losses_and_detections")


def _detect(model: nn.Module, images: list[Tensor]) -> list[Mapping[str, Tensor]]:
    """Return detections, without autocast in a model that would decode them in its precision."""
    if _gives_both(model):
        return model(images)
    with torch.autocast(images[0].device.type, enabled=False):
        return model(images)


@contextmanager
def _anchors_kept(model: nn.Module, device: torch.device) -> Generator[None]:
    """Restore the anchors of torchvision's generators after a pass under autocast."""
    # The generators keep anchors as rounded as the features: evaluations would depend on them
    generators = list[AnchorGenerator]()
    if torch.is_autocast_enabled(device.type) and not _gives_both(model):
        generators = [module for module in model.modules() if isinstance(module, AnchorGenerator)]
    for generator in generators:
        generator.set_cell_anchors(torch.float32, device)
    anchors = [generator.cell_anchors for generator in generators]
    yield
    for generator, cell_anchors in zip(generators, anchors, strict=True):
        generator.cell_anchors = cell_anchors


def _detect_in_one(model: nn.Module, image: Tensor) -> dict[str, Tensor]:
    (detections,) = model(_floats(image))
    return {
        name: detections[name]
        for name in ("boxes", "labels", "scores", "masks")
        if name in detections
    }


def _targets(batch: Batch) -> list[dict[str, Tensor]]:
    names = [name for name in ("boxes", "labels", "masks") if name in batch]
    targets = [{name: batch[name][x] for name in names} for x in range(len(batch["boxes"]))]
    if crowds := batch.get("crowd"):
        return [
            {name: value[~crowd] for name, value in target.items()}
            for target, crowd in zip(targets, crowds, strict=True)
        ]
    return targets


def _at_own_size(
    images: Sequence[Tensor], detect: Callable[[list[int]], list[Mapping[str, Tensor]]]
) -> list[Mapping[str, Tensor]]:
    """Return the detections of each image, calling `detect` for the images of each size."""
    # Padded to the largest image of a batch, smaller images would give other results
    places, detections = dict[torch.Size, list[int]](), dict[int, Mapping[str, Tensor]]()
    for place, image in enumerate(images):
        places.setdefault(image.shape, []).append(place)
    for group in places.values():
        detections |= zip(group, detect(group), strict=True)
    return [detections[place] for place in range(len(images))]


def _image(batch: Batch, place: int, detections: Mapping[str, Tensor]) -> Image:
    """Return an image's boxes and detections, in pixels of the file if its size is known."""
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
        found_boxes=detections["boxes"].float().cpu() * scale,
        found_labels=detections["labels"].cpu(),
        found_scores=detections["scores"].float().cpu(),
        masks=_encoded(batch["masks"][place], size) if "masks" in batch else None,
        found_masks=_encoded(detections["masks"][:, 0], size) if "masks" in detections else None,
    )


def _encoded(masks: Tensor, size: tuple[int, int]) -> list[bytes]:
    """Return the run lengths of masks [N, H, W], or of their probabilities, in pixels of `size`."""
    if not masks.is_floating_point():
        return encode(functional.resize_mask(masks, list(size)).cpu())
    is_same = masks.shape[-2:] == size or not len(masks)
    resized = masks if is_same else functional.resize_image(masks, list(size), antialias=True)
    return encode((resized > 0.5).to(torch.uint8).cpu())


def _short(name: str) -> str:
    """Return a short name for one of torchvision's losses."""
    return {
        "bbox_regression": "boxes",
        "loss_box_reg": "boxes",
        "loss_classifier": "classification",
    }.get(name, name.removeprefix("loss_"))
