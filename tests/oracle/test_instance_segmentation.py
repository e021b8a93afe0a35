"""Mask R-CNN against a plain script: torchvision's own, put together by hand, with samples of proposals so large that no draw decides."""

import pytest
import torch
from samewise_oracle_curves import Task, Trained, batches
from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.transforms.v2 import functional

from samewise.datasets.digits_on_canvas import DigitsOnCanvas
from samewise.recipes.detection import Detection

SAMPLES, HELD, BATCH = 4, 2, 2
CANVAS = {"height": 48, "width": 64, "largest": 32, "smallest": 16, "digits": 2}
SIZES = {"min_size": 48, "max_size": 64, "rpn_post_nms_top_n_train": 20, "rpn_post_nms_top_n_test": 20, "box_batch_size_per_image": 1000}
OVERRIDES = [
    *("recipe=instance_segmentation", "model=maskrcnn_resnet18", "dataset=generated_instance_segmentation", "transforms=detection"),
    *(f"model.{name}={value}" for name, value in SIZES.items()),
    *("+model.rpn_batch_size_per_image=100000", "+model.box_score_thresh=0.001"),
    *(f"dataset.{name}={value}" for name, value in CANVAS.items()),
    *(f"dataset.samples={SAMPLES}", f"dataset.valid_samples={HELD}", "transforms.train.batch.0.p=0.0", f"batch_size={BATCH}"),
    *("optimizer=sgd", "optimizer.lr=0.005", "optimizer.momentum=0.9", "evaluate.batch_size=1", "evaluate.every_epochs=null"),
    *("evaluate.monitor=valid/map", "evaluate.mode=max"),
]


def network() -> MaskRCNN:
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5)
    return MaskRCNN(backbone, 11, rpn_batch_size_per_image=100000, box_score_thresh=0.001, **SIZES)


def canvases(split: str, count: int, precision: torch.dtype) -> tuple[list, list]:
    drawn = [DigitsOnCanvas(split=split, length=count, masks="objects", **CANVAS)[place] for place in range(count)]
    images = [functional.to_dtype(one["image"], torch.float32, scale=True).as_subclass(torch.Tensor).to(precision) for one in drawn]
    targets = [{"boxes": one["boxes"].to(precision), "labels": one["labels"], "masks": one["masks"]} for one in drawn]
    return images, [{name: value.as_subclass(torch.Tensor) for name, value in target.items()} for target in targets]


def plain(model: MaskRCNN, steps: int, shuffle: bool) -> Trained:
    model.train()
    precision = next(model.parameters()).dtype
    images, targets = canvases("train", SAMPLES, precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, foreach=False)
    losses = []
    for batch in batches(SAMPLES, BATCH, steps, shuffle=shuffle):
        loss = sum(model([images[place] for place in batch], [targets[place] for place in batch]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, held_out(model, *canvases("valid", HELD, precision)), model.state_dict())


@torch.no_grad()
def held_out(model: MaskRCNN, images: list, targets: list) -> dict[str, float]:
    from torchmetrics.detection import MeanAveragePrecision

    figures = {}
    for kind, prefix in (("bbox", ""), ("segm", "mask_")):
        precision = MeanAveragePrecision(iou_type=kind)
        for image, target in zip(images, targets, strict=True):
            (found,) = model.eval()([image])
            found = {**found, "boxes": found["boxes"].float(), "scores": found["scores"].float(), "masks": found["masks"][:, 0] > 0.5}
            precision.update([found], [{**target, "masks": target["masks"].bool()}])
        computed = precision.compute()
        figures |= {prefix + name: float(computed[name]) for name in ("map", "map_50", "mar_100")}
    return figures


# Sums of losses are float32.
ROUNDING = {"double": {"losses": 1e-7, "metrics": 1e-6}}
TASK = Task(OVERRIDES, Detection, network, plain, ROUNDING)


@pytest.mark.slow
def test_a_plain_loop_of_mask_rcnn_has_the_same_losses(oracle):
    oracle.require_alike(TASK, 2, "double")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["optimizer.lr=0.01", "the loss is divided by the batch twice"])
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(TASK, 2, "double", fault)
