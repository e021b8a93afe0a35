"""Detection against a plain script: torchvision's RetinaNet put together by hand, its reference's learning rates, torchmetrics' average precision."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from samewise_oracle_curves import Task, Trained, batches, planted
from torch import Tensor
from torchvision.models import resnet18
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from torchvision.transforms.v2 import functional

from samewise.datasets.digits_on_canvas import DigitsOnCanvas
from samewise.recipes.detection import Detection

SAMPLES, HELD, BATCH, CHANNELS = 10, 6, 2, 16
SIZES = ((12, 16), (20, 24), (28, 36), (48, 64))
CANVAS = {"height": 48, "width": 64, "largest": 24, "smallest": 16, "digits": 3, "turned": True}
OVERRIDES = [
    *("recipe=detection", "model=retinanet_resnet18", "model.stages=[1,2]", f"model.channels={CHANNELS}"),
    *(f"model.anchor_sizes={[list(one) for one in SIZES]}", "model.min_size=48", "model.max_size=64"),
    *("model.score_thresh=0.001", "dataset=generated_detection"),
    *(f"dataset.{name}={str(value).lower()}" for name, value in CANVAS.items()),
    *(f"dataset.samples={SAMPLES}", f"dataset.valid_samples={HELD}", "transforms=detection"),
    *("transforms.train.batch.0.p=0.0", "optimizer=sgd", "optimizer.lr=0.01", "optimizer.weight_decay=0.02"),
    *("scheduler=warmup_multi_step", "scheduler.schedules.decay.milestones=[1]", f"batch_size={BATCH}"),
    "evaluate.batch_size=1",  # as in torchvision's references
    "evaluate.every_epochs=null",
]


def network(classes: int = 11) -> RetinaNet:
    pyramid = BackboneWithFPN(resnet18(weights=None), {"layer1": "0", "layer2": "1"}, [64, 128], CHANNELS, extra_blocks=LastLevelP6P7(CHANNELS, CHANNELS))
    anchors = AnchorGenerator(SIZES, ((0.5, 1.0, 2.0),) * len(SIZES))
    return RetinaNet(pyramid, classes, anchor_generator=anchors, min_size=48, max_size=64, score_thresh=0.001)


Images = tuple[list[Tensor], list[dict[str, Tensor]]]


def canvases(split: str, precision: torch.dtype) -> Images:
    count = SAMPLES if split == "train" else HELD
    drawn = [DigitsOnCanvas(split=split, length=count, **CANVAS)[place] for place in range(count)]
    images = [functional.to_dtype(one["image"], torch.float32, scale=True).to(precision) for one in drawn]
    return images, [{"boxes": one["boxes"].to(precision), "labels": one["labels"]} for one in drawn]


def plain(model: RetinaNet, steps: int, shuffle: bool, *, data: Callable[[str, torch.dtype], Images] = canvases) -> Trained:
    model.train()
    images, targets = data("train", next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.02, foreach=False)
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=min(1000, len(images) // BATCH - 1))
    losses = []
    for step, batch in enumerate(batches(len(images), BATCH, steps, shuffle=shuffle)):
        loss = sum(model([images[place] for place in batch], [targets[place] for place in batch]).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        if (step + 1) % (len(images) // BATCH) == 0:
            decay.step()
        losses.append(loss.item())
    return Trained(losses, held_out(model, *data("valid", next(model.parameters()).dtype)), model.state_dict())


@torch.no_grad()
def held_out(model: RetinaNet, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, float]:
    from torchmetrics.detection import MeanAveragePrecision

    precision, total = MeanAveragePrecision(), 0.0
    precision.warn_on_many_detections = False
    for some, true in zip(([image] for image in images), ([target] for target in targets), strict=True):
        precision.update([{**found, "boxes": found["boxes"].float(), "scores": found["scores"].float()} for found in model.eval()(some)], true)
        model.training = True  # only of the outer module, while its parts stay in evaluation mode: torchvision then returns losses
        total += float(sum(model(some, true).values())) * len(some)
    found = precision.compute()
    return {"loss": total / len(images), **{name: float(found[name]) for name in ("map", "map_50", "mar_100")}}


# Sums of losses, and torchmetrics, are float32; which of two hardly trained detections scores more is a matter of the last bit.
ROUNDING = {"single": {"metrics": 0.5}, "double": {"losses": 1e-7, "metrics": 1e-6}}
TASK = Task(OVERRIDES, Detection, network, plain, ROUNDING)


@pytest.mark.parametrize(("steps", "precision"), [pytest.param(4, "single", marks=pytest.mark.slow), (7, "double")])  # an epoch has 5 steps
def test_it_trains_like_the_plain_script_step_by_step(oracle, steps, precision):
    oracle.require_alike(TASK, steps, precision)


@planted(
    *("loader.shuffle=true", "scheduler.schedules.warmup.within_first_epoch=false", "the loss is divided by the batch twice"),
    elsewhere=("optimizer.lr=0.02", "optimizer.weight_decay=0", "gradients are not cleared"),
)
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(TASK, 4, "double", fault)


@pytest.mark.slow
@pytest.mark.data
def test_it_trains_like_the_plain_script_on_real_images(oracle, data_root):
    folder = data_root / "bccd" / "BCCD"

    def cells(split: str, precision: torch.dtype) -> Images:
        images, targets = [], []
        for name in (folder / "ImageSets" / "Main" / f"{'train' if split == 'train' else 'val'}.txt").read_text().split():
            boxes, labels = [], []
            for one in ElementTree.parse(folder / "Annotations" / f"{name}.xml").iter("object"):
                x1, y1, x2, y2 = (float(one.findtext(f"bndbox/{side}")) for side in ("xmin", "ymin", "xmax", "ymax"))
                if x1 < x2 and y1 < y2:
                    boxes.append([x1, y1, x2, y2])
                    labels.append(["Platelets", "RBC", "WBC"].index(one.findtext("name")) + 1)
            image = functional.pil_to_tensor(Image.open(folder / "JPEGImages" / f"{name}.jpg").convert("RGB"))
            images.append(functional.to_dtype(image, torch.float32, scale=True).to(precision))
            targets.append({"boxes": torch.tensor(boxes, dtype=precision), "labels": torch.tensor(labels)})
            if len(images) == 2 * BATCH and split == "train":
                break
        return images, targets

    files = ["dataset=pascal_voc", f"dataset.root={folder}", "dataset.num_classes=4", "dataset.first_pixel=0", "dataset.empty_boxes=drop"]
    # the first four images, epoch after epoch
    first = ["loader.order._target_=samewise.runner.data.order.First", "loader.order._partial_=true", f"loader.order.samples={2 * BATCH}"]
    overrides = [*(one for one in OVERRIDES if not one.startswith("dataset")), *files, *(f"+{one}" for one in first)]
    oracle.require_alike(replace(TASK, overrides=overrides, network=partial(network, 4), plain=partial(plain, data=cells)), 3, "double")
