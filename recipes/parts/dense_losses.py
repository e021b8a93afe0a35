"""RetinaNet's losses without waiting for the device: masks in place of torchvision's indexing.

With indexing, the host must know sizes. The definitions are torchvision's
(torchvision/models/detection/retinanet.py, `compute_loss`); the sums cover all anchors, with zero
for those that do not count.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import ops
from torchvision.models.detection._utils import encode_boxes
from torchvision.models.detection.image_list import ImageList

from samewise.recipes.parts.losses import of_samples

_OVERLAPS = {
    "giou": ops.generalized_box_iou_loss,
    "diou": ops.distance_box_iou_loss,
    "ciou": ops.complete_box_iou_loss,
}
_IGNORED = -2


def losses(
    model: Any, images: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the losses that torchvision's RetinaNet returns in training.

    Args:
        model: A torchvision.models.detection.RetinaNet in training mode.
        images: float32[3, H, W] each, in [0, 1], on the device.
        targets: For each image `boxes`, float32[M, 4], and `labels`, int64[M].

    Returns:
        `classification` and `bbox_regression`, means over the images; NaN if a box has no area.
    """
    resized, boxes = zip(
        *(
            _resize(model.transform, image, target["boxes"])
            for image, target in zip(images, targets, strict=True)
        ),
        strict=True,
    )
    sizes = [(image.shape[-2], image.shape[-1]) for image in resized]
    batched = ImageList(
        model.transform.batch_images(list(resized), size_divisible=model.transform.size_divisible),
        sizes,
    )
    features = list(model.backbone(batched.tensors).values())
    outputs: dict[str, Tensor] = model.head(features)
    (anchors, *_) = model.anchor_generator(batched, features)
    return of_outputs(model, outputs, anchors, boxes, targets)


def of_outputs(
    model: Any,
    outputs: Mapping[str, Tensor],
    anchors: Tensor,
    boxes: Sequence[Tensor],
    targets: Sequence[Mapping[str, Tensor]],
) -> dict[str, Tensor]:
    """Return the losses of the head's outputs, by name, means over the images.

    Args:
        model: The RetinaNet.
        outputs: `cls_logits` float[B, A, C] and `bbox_regression` float[B, A, 4].
        anchors: float[A, 4].
        boxes: For each image its boxes after resizing, float32[M, 4].
        targets: For each image `labels`, int64[M].
    """
    image_losses = [
        _image_losses(
            model,
            outputs["cls_logits"][place],
            outputs["bbox_regression"][place],
            anchors,
            boxes[place],
            targets[place]["labels"],
        )
        for place in range(len(boxes))
    ]
    classification, regression = (
        torch.stack(parts).sum() / max(1, len(boxes)) for parts in zip(*image_losses, strict=True)
    )
    return {"classification": classification, "bbox_regression": regression}


def _resize(transform: Any, image: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised image in the model's size, and its boxes there."""
    mean, std = (
        _constant(tuple(values), image.dtype, image.device)
        for values in (transform.image_mean, transform.image_std)
    )
    resized, _ = transform.resize((image - mean[:, None, None]) / std[:, None, None], None)
    across, down = resized.shape[-1] / image.shape[-1], resized.shape[-2] / image.shape[-2]
    return resized, boxes if across == down == 1 else torch.stack(
        [boxes[:, 0] * across, boxes[:, 1] * down, boxes[:, 2] * across, boxes[:, 3] * down], 1
    )


@lru_cache(maxsize=16)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _image_losses(
    model: Any, logits: Tensor, regressed: Tensor, anchors: Tensor, boxes: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Return both losses of an image, divided by the number of its foreground anchors.

    Args:
        model: The RetinaNet.
        logits: float[A, C].
        regressed: float[A, 4].
        anchors: float[A, 4].
        boxes: float[M, 4].
        labels: int64[M].
    """
    matched = _match_anchors(model.proposal_matcher, anchors, boxes)
    foreground = matched >= 0
    count = foreground.sum().clamp(min=1)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    if not len(boxes):
        # Any values will do: no anchor is matched to them
        boxes, labels = anchors[:1], classes[:1]
    nearest = matched.clamp(min=0)
    presence = ((labels[nearest][:, None] == classes) & foreground[:, None]).to(logits.dtype)
    focal = (
        ops.sigmoid_focal_loss(logits, presence, reduction="none")
        if model.class_loss is None
        else of_samples(model.class_loss, logits, presence)[:, None]
    )
    focal = torch.where((matched != _IGNORED)[:, None], focal, 0.0).sum() / count
    head = model.head.regression_head
    placed = _box_loss(head._loss_type, head.box_coder, anchors, boxes[nearest], regressed)
    # torchvision checks this on the host, which would wait for the device
    sound = torch.where((boxes[:, 2:] > boxes[:, :2]).all(), 1.0, torch.nan)
    return focal * sound, torch.where(foreground, placed, 0.0).sum() / count * sound


def _match_anchors(matcher: Any, anchors: Tensor, boxes: Tensor) -> Tensor:
    """Return int64[A]: each anchor's box, -1 for background, -2 in between.

    As torchvision's Matcher, which always keeps each box's best anchors.
    """
    if not len(boxes):
        return torch.full((len(anchors),), -1, device=anchors.device)
    overlap = ops.box_iou(boxes, anchors)
    best, place = overlap.max(dim=0)
    matched = torch.where(
        best < matcher.low_threshold,
        -1,
        torch.where(best < matcher.high_threshold, _IGNORED, place),
    )
    if not matcher.allow_low_quality_matches:
        return matched
    return torch.where(
        (overlap == overlap.max(dim=1, keepdim=True).values).any(dim=0), place, matched
    )


def _box_loss(kind: str, coder: Any, anchors: Tensor, boxes: Tensor, regressed: Tensor) -> Tensor:
    """Return the box loss of each anchor, [A], as torchvision's detection._utils._box_loss."""
    if kind in ("l1", "smooth_l1"):
        target = encode_boxes(
            boxes, anchors, _constant(tuple(coder.weights), boxes.dtype, boxes.device)
        )
        return (F.l1_loss if kind == "l1" else F.smooth_l1_loss)(
            regressed, target, reduction="none"
        ).sum(1)
    return _OVERLAPS[kind](
        coder.decode_single(regressed, anchors), boxes, reduction="none", eps=1e-7
    )
