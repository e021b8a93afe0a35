"""Clips [B, T, C, H, W] through the transforms of images: one choice per clip, the same for all its frames."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from samewise.datasets.transforms.affine import RandomAffine
from samewise.datasets.transforms.clips import ChannelsBeforeTime
from samewise.datasets.transforms.colour import ColorJitter, RandomGrayscale
from samewise.datasets.transforms.erasing import RandomErasing
from samewise.datasets.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, RandomVerticalFlip, Resize
from samewise.datasets.transforms.mixing import CutMix, MixUp
from samewise.datasets.transforms.numeric import Normalize, ToFloat
from samewise.datasets.transforms.photometric import RandomPhotometricDistort
from samewise.datasets.transforms.policies import RandAugment, TrivialAugmentWide
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Batch, BatchTransform

BYTES: dict[str, Callable[[], BatchTransform]] = {
    "ToFloat": ToFloat,
    "RandomHorizontalFlip": RandomHorizontalFlip,
    "RandomVerticalFlip": RandomVerticalFlip,
    "RandomCrop": lambda: RandomCrop(20, padding=3),
    "RandomResizedCrop": lambda: RandomResizedCrop(24),
    "CenterCrop": lambda: CenterCrop(16),
    "Resize": lambda: Resize(16),
    "RandomErasing": lambda: RandomErasing(0.7),
    "RandomAffine": lambda: RandomAffine(20, translate=(0.1, 0.2), scale=(0.8, 1.3), shear=10, fill=0.5),
    "ColorJitter": lambda: ColorJitter(brightness=0.5, contrast=0.5, saturation=0.5),
    "RandomGrayscale": lambda: RandomGrayscale(0.5),
    "RandomPhotometricDistort": RandomPhotometricDistort,
    "RandAugment": RandAugment,
    "TrivialAugmentWide": TrivialAugmentWide,
}
FLOATS: dict[str, Callable[[], BatchTransform]] = {
    "Normalize": lambda: Normalize(mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.4]),
    "MixUp": lambda: MixUp(0.4, num_classes=7),
    "CutMix": lambda: CutMix(num_classes=7),
}
ALL = BYTES | FLOATS


def clips_of(name: str, size: int = 6, frames: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(3)
    images = torch.nn.functional.interpolate(torch.rand(size * frames, 3, 8, 10, generator=generator), size=(24, 30), mode="bicubic").clamp(0, 1)
    images = images if name in FLOATS else (images * 255).round().to(torch.uint8)
    return {"image": images.unflatten(0, (size, frames)), "label": torch.arange(size) % 7}


def draw_choices(transform: BatchTransform, batch: Batch) -> dict[str, Tensor]:
    with streams.scope(0, "step", 5, 0):
        return transform.draw(batch, len(batch["image"]))


@pytest.mark.parametrize("name", [*BYTES, "Normalize"])
def test_a_batch_of_clips_gives_what_its_clips_give_one_by_one(name):
    transform, batch = ALL[name](), clips_of(name)
    choices = draw_choices(transform, batch)
    together = transform.apply(batch, choices)["image"]
    rows = [{key: value[place : place + 1] for key, value in choices.items()} for place in range(6)]
    alone = [transform.apply({"image": clip[None]}, row)["image"][0] for clip, row in zip(batch["image"], rows, strict=True)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-6, atol=1e-6)
    listed = transform.apply({"image": list(batch["image"])}, choices)["image"]
    torch.testing.assert_close(together, torch.stack(list(listed)), rtol=1e-6, atol=1e-6)


def test_channels_come_before_time_for_a_model_of_clips():
    batch = clips_of("Normalize")
    moved = ChannelsBeforeTime()(batch)["image"]
    assert moved.is_contiguous()
    assert torch.equal(moved, batch["image"].permute(0, 2, 1, 3, 4))
    with pytest.raises(ConfigError, match="requires clips"):
        ChannelsBeforeTime()({"image": batch["image"][:, 0]})
