"""RetinaNet on torchvision's ResNets, with every choice of the published recipes as an argument.

Source: Lin et al. 2017, Focal Loss for Dense Object Detection, arXiv 1708.02002. torchvision's own
functions make implicit choices: with neither `weights` nor `weights_backbone` they build plain
batch norm with all layers trainable, else frozen batch norm and three trainable layers. Here `norm`
and `trainable_layers` are what the config says, and a frozen part without pretrained weights is an
error.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, final

import torch
import torchvision.models
from torch import Tensor, nn
from torchvision import ops
from torchvision.models.detection._utils import overwrite_eps
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelP6P7
from torchvision.ops.misc import Conv2dNormActivation, FrozenBatchNorm2d

from samewise.recipes.models.activations import with_activation
from samewise.recipes.parts import dense_losses
from samewise.runner.errors import ConfigError, nearest

Norm = Literal["frozen_batch", "batch", "group"]

BACKBONES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "wide_resnet50_2",
    "wide_resnet101_2",
)

_GROUPS = 32
_STAGES = ("conv1", "layer1", "layer2", "layer3", "layer4")


@final
class RetinaNet(TorchvisionRetinaNet):
    """torchvision's RetinaNet, with its parameter names.

    In addition, it can return losses and detections in one pass.
    """

    _weights_are_known = False
    class_loss: nn.Module | None = None
    """As in `retinanet`."""

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        """Return a dict of losses in training, a list of detections in evaluation.

        Args:
            images: float32[3, H, W] each, in [0, 1].
            targets: In training for each image `boxes`, float32[N, 4] in pixels, and `labels`,
                int64[N].

        Raises:
            ConfigError: In the first training step, a part of the backbone is frozen that has no
                pretrained weights.
        """
        if self.training and not self._weights_are_known:
            _require_pretrained(self.backbone.body)
            self._weights_are_known = True
        # torchvision's losses would wait for the device
        is_dense = images[0].is_cuda or self.class_loss is not None
        if self.training and targets is not None and is_dense:
            return dense_losses.losses(self, images, targets)
        return super().forward(images, targets)

    def losses_and_detections(
        self, images: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Return losses and detections of one pass in evaluation mode.

        The losses are means over the images, as in training; the detections are in pixels of the
        images.
        """
        sizes = [(image.shape[-2], image.shape[-1]) for image in images]
        batched, resized = self.transform(images, targets)
        features = list(self.backbone(batched.tensors).values())
        outputs: dict[str, Tensor] = self.head(features)
        anchors = self.anchor_generator(batched, features)
        if self.class_loss is None:
            losses = self.compute_loss(resized, outputs, anchors)
        else:
            losses = dense_losses.of_outputs(
                self, outputs, anchors[0], [target["boxes"] for target in resized], targets
            )
        return losses, self._detections(outputs, anchors, features, batched, sizes)

    def postprocess_detections(
        self,
        head_outputs: dict[str, list[Tensor]],
        anchors: list[list[Tensor]],
        image_shapes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """Return the detections, as torchvision's."""
        # torch.export cannot trace torchvision's order; here the best of each level come first,
        # then those above the threshold are selected
        if not torch.compiler.is_exporting():
            return super().postprocess_detections(head_outputs, anchors, image_shapes)
        detections = list[dict[str, Tensor]]()
        for place, shape in enumerate(image_shapes):
            levels = zip(
                head_outputs["cls_logits"],
                head_outputs["bbox_regression"],
                anchors[place],
                strict=True,
            )
            boxes, scores, labels = map(
                torch.cat,
                zip(
                    *(
                        self._best(logits[place], boxes[place], level_anchors, shape)
                        for logits, boxes, level_anchors in levels
                    ),
                    strict=True,
                ),
            )
            is_likely = scores > self.score_thresh
            boxes, scores, labels = boxes[is_likely], scores[is_likely], labels[is_likely]
            # Shifted by their label, boxes of different labels do not overlap
            shifted = boxes + (labels.to(boxes) * (max(shape) + 1))[:, None]
            survivors = ops.nms(shifted, scores, self.nms_thresh)[: self.detections_per_img]
            detections.append(
                {
                    "boxes": boxes[survivors],
                    "scores": scores[survivors],
                    "labels": labels[survivors],
                }
            )
        return detections

    def _best(
        self, logits: Tensor, regressed: Tensor, anchors: Tensor, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the boxes with the best scores of one level, their scores, and their labels."""
        classes = logits.shape[-1]
        scores, places = logits.sigmoid().flatten().topk(min(self.topk_candidates, logits.numel()))
        indices = places.div(classes, rounding_mode="floor")
        return (
            ops.clip_boxes_to_image(
                self.box_coder.decode_single(regressed[indices], anchors[indices]), shape
            ),
            scores,
            places % classes,
        )

    def _detections(
        self,
        outputs: Mapping[str, Tensor],
        anchors: list[Tensor],
        features: list[Tensor],
        batched: ImageList,
        sizes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        per_place = self.anchor_generator.num_anchors_per_location()[0]
        counts = [feature.shape[-2] * feature.shape[-1] * per_place for feature in features]
        by_level = {name: list(output.split(counts, dim=1)) for name, output in outputs.items()}
        detections = self.postprocess_detections(
            by_level, [list(x.split(counts)) for x in anchors], batched.image_sizes
        )
        return self.transform.postprocess(detections, batched.image_sizes, sizes)


def retinanet(
    *,
    backbone: str = "resnet50",
    version: Literal[1, 2] = 1,
    num_classes: int = 91,
    norm: Norm = "batch",
    trainable_layers: int = 5,
    weights: str | None = None,
    weights_backbone: str | None = None,
    stages: Sequence[int] = (2, 3, 4),
    extra_levels: bool = True,
    channels: int = 256,
    head_convs: int = 4,
    head_norm: Literal["none", "group"] | None = None,
    box_loss: Literal["l1", "smooth_l1", "giou", "diou", "ciou"] | None = None,
    class_loss: nn.Module | None = None,
    activation: str = "relu",
    anchor_sizes: Sequence[Sequence[float]] | None = None,
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    min_size: int = 800,
    max_size: int = 1333,
    resize_in_training: bool = True,
    image_mean: Sequence[float] = (0.485, 0.456, 0.406),
    image_std: Sequence[float] = (0.229, 0.224, 0.225),
    fg_iou_thresh: float = 0.5,
    bg_iou_thresh: float = 0.4,
    score_thresh: float = 0.05,
    nms_thresh: float = 0.5,
    topk_candidates: int = 1000,
    detections_per_img: int = 300,
) -> RetinaNet:
    """Create RetinaNet with a ResNet and a feature pyramid.

    With ResNet-50, 91 classes and the defaults below, version 1 has 34,014,999 parameters with
    frozen batch norm (as published) and version 2 has 38,198,935.

    Args:
        backbone: One of `BACKBONES`.
        version: 1, torchvision's retinanet_resnet50_fpn: L1 box loss, no norm in the head, P6
            computed from P5. 2, its ..._v2: GIoU loss, group norm in the head, P6 computed from C5.
        num_classes: Outputs for each anchor, with the background (label 0).
        norm: The backbone's normalisation. "frozen_batch": constant, from the pretrained weights;
            "batch": batch norm, whose statistics are updated in training; "group": group norm, for
            training from scratch with few images per step.
        trainable_layers: Number of trained parts of layer4, layer3, layer2, layer1 and the stem, in
            this order; 5: all.
        weights: A name of torchvision's weights of the whole model (COCO_V1, for ResNet-50),
            downloaded unless in its cache; None: `initialise.weights` takes a local file.
        weights_backbone: A name of torchvision's weights of the backbone (IMAGENET1K_V1),
            downloaded unless in its cache; None: from scratch, or from a local file: `initialise:
            {weights: FILE, into: backbone.body, exclude: [fc.*]}`.
        stages: The stages of layer1 to layer4 that feed the pyramid.
        extra_levels: Whether the pyramid has two more levels, each half the size of the one before.
        channels: Channels of the pyramid and the head.
        head_convs: Number of 3x3 convolutions in each of the two heads.
        head_norm: The head's normalisation, "group" or "none"; None: the version's.
        box_loss: The loss of boxes, such as "l1" or "giou"; None: the version's.
        class_loss: A module from an anchor's logits float[A, K] and zeros and ones of the same
            shape to float[A] (`parts.losses`); None: the focal loss of the source, with alpha 0.25
            and gamma 2.
        activation: The activation of backbone and heads, a function of torch.nn.functional.
        anchor_sizes: For each level, the square roots of its anchors' areas, in pixels of the
            resized image; None: the published ones, three to an octave from 32 on.
        aspect_ratios: Height / width of the anchors.
        min_size: Length in pixels to which the shorter side is resized.
        max_size: Upper limit of the longer side in pixels.
        resize_in_training: Whether the model resizes images in training; False: the transforms do
            (multi-scale).
        image_mean: Mean of each channel of images in [0, 1].
        image_std: Standard deviation of each channel of images in [0, 1].
        fg_iou_thresh: An anchor belongs to an object that it overlaps by at least this IoU; so do
            each object's best anchors.
        bg_iou_thresh: An anchor is background if it overlaps every object by less than this IoU;
            between the two thresholds it does not count.
        score_thresh: Lower limit of the detections' scores.
        nms_thresh: If two detections of a class overlap by more than this IoU, only the one with
            the higher score is kept.
        topk_candidates: Number of detections of each level that are kept, by score, before
            overlapping ones are removed.
        detections_per_img: Number of detections of an image that are kept at the end, by score.

    Returns:
        The detector.

    Raises:
        ConfigError: The backbone is unknown, or the choices contradict each other.
    """
    _check(backbone, norm, trainable_layers, weights or weights_backbone, stages)
    published = _weights(
        "weights", f"retinanet_{backbone}_fpn" + ("" if version == 1 else "_v2"), weights
    )
    # The model's weights include the backbone's
    for_body = None if published else _weights("weights_backbone", backbone, weights_backbone)
    norm_layer = {
        "frozen_batch": FrozenBatchNorm2d,
        "batch": nn.BatchNorm2d,
        "group": partial(nn.GroupNorm, _GROUPS),
    }[norm]
    body = getattr(torchvision.models, backbone)(weights=for_body, norm_layer=norm_layer)
    _freeze(body, trainable_layers)
    # Each stage has twice as many channels as the one before
    widths = [body.inplanes // 2 ** (4 - stage) for stage in stages]
    if version == 2 and extra_levels:
        extra: ExtraFPNBlock = LastLevelP6P7(widths[-1], channels)
    else:
        extra = LastLevelP6P7(channels, channels) if extra_levels else _NoExtraLevel()
    pyramid = BackboneWithFPN(
        body,
        {f"layer{stage}": str(place) for place, stage in enumerate(stages)},
        widths,
        channels,
        extra_blocks=extra,
    )
    anchors = _anchors(anchor_sizes, aspect_ratios, levels=len(stages) + 2 * extra_levels)
    group = head_norm == "group" if head_norm else version == 2
    head = _Head(
        channels,
        anchors.num_anchors_per_location()[0],
        num_classes,
        norm_layer=partial(nn.GroupNorm, _GROUPS) if group else None,
    )
    if head_convs != 4:
        _shorten(head, head_convs, channels, group=group)
    head.regression_head._loss_type = box_loss or ("l1" if version == 1 else "giou")
    model = RetinaNet(
        pyramid,
        num_classes,
        anchor_generator=anchors,
        head=head,
        min_size=min_size,
        max_size=max_size,
        _skip_resize=not resize_in_training,
        image_mean=list(image_mean),
        image_std=list(image_std),
        fg_iou_thresh=fg_iou_thresh,
        bg_iou_thresh=bg_iou_thresh,
        score_thresh=score_thresh,
        nms_thresh=nms_thresh,
        topk_candidates=topk_candidates,
        detections_per_img=detections_per_img,
    )
    if published:
        model.load_state_dict(published.get_state_dict(check_hash=True))
        # COCO_V1 of version 1 was trained before frozen batch norm had an epsilon
        overwrite_eps(model, 0.0 if version == 1 else 1e-5)
    if class_loss is not None:
        model.class_loss = class_loss
    if activation != "relu":
        with_activation(model, activation=activation)
    return model


@final
class _Head(RetinaNetHead):
    """A head with outputs of at least float32, also under autocast.

    Boxes, overlaps and losses are computed in the precision of its outputs.
    """

    def forward(self, x: list[Tensor]) -> dict[str, Tensor]:
        return {
            name: output.float() if output.dtype.itemsize < 4 else output
            for name, output in super().forward(x).items()
        }


@final
class _Anchors(AnchorGenerator):
    """Anchors of at least float32, whatever the precision of the features."""

    # Bfloat16 has only multiples of 4 from 512 on
    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        super().set_cell_anchors(torch.float32 if dtype.itemsize < 4 else dtype, device)


@final
class _NoExtraLevel(ExtraFPNBlock):
    """Leaves the pyramid unchanged."""

    def forward(
        self, results: list[Tensor], x: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        return results, names


def _check(
    backbone: str,
    norm: str,
    trainable_layers: int,
    weights_backbone: str | None,
    stages: Sequence[int],
) -> None:
    ConfigError.raise_if(
        backbone not in BACKBONES,
        "model.backbone",
        "is not one of torchvision's ResNets",
        backbone,
        ", ".join(BACKBONES),
        nearest(backbone, BACKBONES),
    )
    ConfigError.raise_if(
        not 0 <= trainable_layers <= 5,
        "model.trainable_layers",
        "is not a valid number of layers",
        trainable_layers,
        "0 to 5",
    )
    ConfigError.raise_if(
        norm == "group" and (weights_backbone or trainable_layers < 5),
        "model.norm",
        "is only for training from scratch: no pretrained weights use group norm",
        norm,
        "frozen_batch or batch",
    )
    ConfigError.raise_if(
        not stages or list(stages) != sorted(set(stages)) or not 1 <= stages[0] <= stages[-1] <= 4,
        "model.stages",
        "are not stages of a ResNet",
        list(stages),
        "some of 1, 2, 3, 4, ascending",
    )


def _weights(argument: str, model: str, name: str | None) -> Any:
    if name is None:
        return None
    names = (
        list(torchvision.models.get_model_weights(model).__members__)
        if model in torchvision.models.list_models()
        else []
    )
    ConfigError.raise_if(
        name not in names,
        f"model.{argument}",
        f"torchvision does not have these weights for {model}",
        name,
        ", ".join(names),
        nearest(name, names)
        or "for a local file, set initialise.weights (and initialise.into=backbone.body "
        "for a backbone)",
    )
    return torchvision.models.get_model_weights(model)[name]


def _freeze(body: nn.Module, trainable_layers: int) -> None:
    trained = (
        *_STAGES[len(_STAGES) - trainable_layers :],
        *(("bn1",) if trainable_layers == 5 else ()),
    )
    for name, parameter in body.named_parameters():
        if not name.startswith(trained):
            parameter.requires_grad_(False)


def _anchors(
    sizes: Sequence[Sequence[float]] | None, ratios: Sequence[float], *, levels: int
) -> AnchorGenerator:
    if sizes is None:
        sizes = [
            (base, int(base * 2 ** (1 / 3)), int(base * 2 ** (2 / 3)))
            for base in (32 * 2**level for level in range(levels))
        ]
    ConfigError.raise_if(
        len(sizes) != levels or len({len(level_sizes) for level_sizes in sizes}) != 1,
        "model.anchor_sizes",
        "do not fit the pyramid",
        [list(level_sizes) for level_sizes in sizes],
        f"{levels} lists of equal length, one per level",
    )
    return _Anchors(tuple(tuple(level_sizes) for level_sizes in sizes), (tuple(ratios),) * levels)


def _shorten(head: RetinaNetHead, convs: int, channels: int, *, group: bool) -> None:
    """Use another number of convolutions in both heads, initialised as torchvision's."""
    for part in (head.classification_head, head.regression_head):
        part.conv = nn.Sequential(
            *(
                Conv2dNormActivation(
                    channels, channels, norm_layer=partial(nn.GroupNorm, _GROUPS) if group else None
                )
                for _ in range(convs)
            )
        )
        for layer in part.conv.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)


def _require_pretrained(body: nn.Module) -> None:
    """Raise a ConfigError for frozen norms with their initial mean 0 and variance 1."""
    # Such norms have seen neither pretrained weights nor images
    norms = [
        module
        for module in body.modules()
        if isinstance(module, FrozenBatchNorm2d | nn.BatchNorm2d)
    ]
    frozen = any(isinstance(module, FrozenBatchNorm2d) for module in norms) or any(
        not parameter.requires_grad for parameter in body.parameters()
    )
    if not frozen or not norms:
        return
    ConfigError.raise_if(
        all(
            bool((module.running_mean == 0).all()) and bool((module.running_var == 1).all())
            for module in norms
            if isinstance(module.running_mean, Tensor)
        ),
        "model.weights_backbone",
        "a frozen part of the backbone has no pretrained weights: it would stay random",
        expected="model.weights_backbone=IMAGENET1K_V1, or a local file in "
        "initialise.weights with initialise.into=backbone.body",
        hint="to train from scratch: model.norm=batch model.trainable_layers=5",
    )
