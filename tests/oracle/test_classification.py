"""Classification against a plain script: torchvision's blocks, scikit-learn's digits, and torch's own loss, optimizer and schedule."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from samewise_oracle_curves import Task, Trained, batches, planted
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock
from torchvision.transforms.v2 import functional

from samewise.recipes.classification import Classification

BATCH, WIDTH = 96, 8
OVERRIDES = [
    *("recipe=classification", "model=resnet18_small", f"model.width={WIDTH}", "dataset=digits", "transforms=images"),
    *("optimizer=sgd", "optimizer.nesterov=true", "optimizer.lr=0.05", "optimizer.weight_decay=0.02"),
    *("param_groups=no_decay_on_norms", "scheduler=one_cycle", "scheduler.cycle_momentum=false"),
    *("recipe.label_smoothing=0.1", "clip_norm=2.0", f"batch_size={BATCH}", "evaluate.batch_size=100"),
]


def network(channels: int = 1) -> nn.Sequential:
    """A narrow ResNet-18 with a stem that keeps every pixel."""

    def stage(inputs: int, width: int) -> nn.Sequential:
        stride = 1 if inputs == width else 2
        shortcut = None if inputs == width else nn.Sequential(nn.Conv2d(inputs, width, 1, 2, bias=False), nn.BatchNorm2d(width))
        return nn.Sequential(BasicBlock(inputs, width, stride, shortcut), BasicBlock(width, width))

    layers = OrderedDict[str, nn.Module](conv1=nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(WIDTH), relu=nn.ReLU())
    for number in range(4):
        layers[f"layer{number + 1}"] = stage(WIDTH * 2 ** max(number - 1, 0), WIDTH * 2**number)
    layers.update(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(8 * WIDTH, 10))
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised images and labels to learn from, and those that are held out: every fifth of each class."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    held = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        held[np.nonzero(labels == digit)[0][4::5]] = True
    bytes_, labels = torch.tensor(pixels * 255 // 16, dtype=torch.uint8).view(-1, 1, 8, 8), torch.tensor(labels)
    images = functional.normalize(functional.to_dtype(bytes_, torch.float32, scale=True), [0.304], [0.376])
    return images[~held], labels[~held], images[held], labels[held]


def plain(model: nn.Module, steps: int, shuffle: bool, *, data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]] = digits, replicas: int = 1) -> Trained:
    """Each replica processes its part of a batch separately; batch norms keep the statistics of the first replica."""
    images, labels, held_images, held_labels = data()
    precision = next(model.parameters()).dtype
    norms = {parameter for module in model.modules() if isinstance(module, nn.BatchNorm2d) for parameter in module.parameters()}
    groups = [{"params": [parameter for parameter in model.parameters() if parameter not in norms]}, {"params": list(norms), "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.02, foreach=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps, cycle_momentum=False)
    losses = []
    for batch in batches(len(images), BATCH, steps, shuffle=shuffle):
        optimizer.zero_grad()
        loss, statistics = 0.0, {}
        for part in torch.tensor(batch).chunk(replicas):
            share = F.cross_entropy(model(images[part].to(precision)), labels[part], label_smoothing=0.1) / replicas
            share.backward()
            loss += share.item()
            statistics = statistics or {name: value.clone() for name, value in model.named_buffers()}
        model.load_state_dict(statistics, strict=False)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        schedule.step()
        losses.append(loss)
    model.eval()
    with torch.no_grad():
        logits = model(held_images.to(precision))
    right = (logits.argmax(1) == held_labels).double().mean().item()
    return Trained(losses, {"loss": F.cross_entropy(logits, held_labels).item(), "accuracy": right}, model.state_dict())


TASK = Task(OVERRIDES, Classification, network, plain)


@pytest.mark.parametrize(("steps", "precision"), [(4, "single"), pytest.param(17, "double", marks=pytest.mark.slow)])  # an epoch has 14 steps
def test_it_trains_like_the_plain_script_step_by_step(oracle, steps, precision):
    oracle.require_alike(TASK, steps, precision)


def test_so_do_two_replicas_that_share_a_batch_in_channels_last(oracle):
    task = replace(TASK, overrides=[*OVERRIDES, "replicas=2", "memory_format=channels_last"], plain=partial(plain, replicas=2))
    oracle.require_alike(task, 6, "double")


@planted(
    *("optimizer.weight_decay=0", "evaluation is in training mode", "param_groups=none", "clip_norm=null", "recipe.label_smoothing=0", "labels are shifted"),
    elsewhere=(
        *("the schedule is a step late", "optimizer.lr=0.1", "optimizer.nesterov=false", "loader.shuffle=true"),
        *("the loss is divided by the batch twice", "gradients are not cleared"),
    ),
)
def test_a_planted_fault_makes_the_two_diverge(oracle, fault):
    oracle.require_parted(TASK, 5, "double", fault)


@pytest.mark.slow
@pytest.mark.long
def test_over_seeds_it_learns_like_the_plain_script(oracle):
    oracle.require_same_distribution(TASK, 42, "accuracy")


@pytest.mark.slow
@pytest.mark.data
def test_it_trains_like_the_plain_script_on_real_photographs(oracle, data_root, tmp_path):
    """Forty of each class to learn from, ten to hold out."""
    chosen = {"train": [], "valid": []}
    for label, folder in enumerate(sorted((data_root / "cifar10_images" / "train").iterdir())):
        for place, path in enumerate(sorted(folder.glob("*.jpg"))[:50]):
            split = "train" if place < 40 else "valid"
            chosen[split].append((path, label))
            (tmp_path / "photographs" / split / folder.name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "photographs" / split / folder.name / path.name).symlink_to(path)

    def photographs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made = []
        for rows in chosen.values():
            pixels = torch.stack([functional.pil_to_tensor(Image.open(path).convert("RGB")) for path, _ in rows])
            images = functional.normalize(functional.to_dtype(pixels, torch.float32, scale=True), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
            made += [images, torch.tensor([label for _, label in rows])]
        return tuple(made)

    overrides = [*(one for one in OVERRIDES if not one.startswith("dataset")), "dataset=image_folder", f"dataset.root={tmp_path / 'photographs'}"]
    oracle.require_alike(replace(TASK, overrides=overrides, network=partial(network, 3), plain=partial(plain, data=photographs)), 5, "double")
