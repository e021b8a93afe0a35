"""Segmentation against a plain script: torchvision's own LRASPP, its reference's criterion and polynomial rates, IoU from sets of pixels."""

import pytest
import torch
from samewise_oracle_curves import Task, Trained, batches, planted
from torch import Tensor, nn
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
from torchvision.transforms.v2 import functional

from samewise.datasets.digits_on_canvas import DigitsOnCanvas
from samewise.recipes.segmentation import Segmentation

SAMPLES, HELD, BATCH = 12, 5, 4
CANVAS = {"height": 48, "width": 64, "digits": 2, "smallest": 16, "largest": 32}
OVERRIDES = [
    *("recipe=segmentation", "model=lraspp_mobilenet_v3_large", "dataset=generated_segmentation", "transforms=images"),
    *(f"dataset.{name}={value}" for name, value in CANVAS.items()),
    *(f"dataset.samples={SAMPLES}", f"dataset.valid_samples={HELD}", f"batch_size={BATCH}", "evaluate.batch_size=2"),
    *("dataset.mean=[0.25,0.25,0.25]", "dataset.std=[0.5,0.5,0.5]", "optimizer=sgd", "optimizer.lr=0.02", "optimizer.momentum=0.9"),
    *("optimizer.weight_decay=0.01", "scheduler=polynomial", "scheduler.power=0.9", "scheduler.unit=step", "scheduler.total=10"),
    "evaluate.every_epochs=null",
]


def network() -> nn.Module:
    return lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=11)


def canvases(split: str, count: int, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    drawn = [DigitsOnCanvas(split=split, length=count, masks="classes", **CANVAS)[place] for place in range(count)]
    images = functional.to_dtype(torch.stack([one["image"] for one in drawn]).as_subclass(Tensor), torch.float32, scale=True)
    masks = torch.stack([one["mask"] for one in drawn]).as_subclass(Tensor)
    return functional.normalize(images, [0.25] * 3, [0.5] * 3).to(precision), masks.long()


def plain(model: nn.Module, steps: int, shuffle: bool) -> Trained:
    model.train()
    precision = next(model.parameters()).dtype
    images, masks = canvases("train", SAMPLES, precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01, foreach=False)
    decay = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10, power=0.9)
    losses = []
    for batch in batches(SAMPLES, BATCH, steps, shuffle=shuffle):
        loss = nn.functional.cross_entropy(model(images[batch])["out"], masks[batch], ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        losses.append(loss.item())
    return Trained(losses, held_out(model, *canvases("valid", HELD, precision)), model.state_dict())


@torch.no_grad()
def held_out(model: nn.Module, images: Tensor, masks: Tensor) -> dict[str, float]:
    logits = torch.cat([model.eval()(image[None])["out"] for image in images])
    found = logits.argmax(1)
    pairs = [(masks == label, found == label) for label in range(11)]
    overlaps = [int((true & guess).sum()) / int((true | guess).sum()) for true, guess in pairs if (true | guess).any()]
    accuracy = (found == masks).double().mean().item()
    return {"loss": nn.functional.cross_entropy(logits, masks).item(), "miou": sum(overlaps) / len(overlaps), "pixel_accuracy": accuracy}


# At the border of two classes, which is the larger is a matter of the last bit; and running means of zero are rounding alone.
ROUNDING = {"single": {"losses": 5e-3, "weights": 1.0, "metrics": 0.5}, "double": {"weights": 1e-3, "metrics": 1e-8}}
TASK = Task(OVERRIDES, Segmentation, network, plain, ROUNDING)


@pytest.mark.parametrize(("steps", "precision"), [pytest.param(4, "single", marks=pytest.mark.slow), (5, "double")])
def test_it_trains_like_the_plain_script_step_by_step(oracle, steps, precision):
    oracle.require_alike(TASK, steps, precision)


@planted("scheduler.power=1.0", "the loss is divided by the batch twice", elsewhere=("optimizer.lr=0.04", "gradients are not cleared"))
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(TASK, 4, "double", fault)
