"""Clips [B, T, C, H, W] through the transforms of images: one choice per clip, the same for all its frames."""

from collections.abc import Callable

import pytest
import torch

from samewise.datasets.transforms.clips import ChannelsBeforeTime
from samewise.datasets.transforms.mixing import CutMix, MixUp
from samewise.datasets.transforms.numeric import Normalize
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Batch, BatchTransform

FLOATS: dict[str, Callable[[], BatchTransform]] = {
    "Normalize": lambda: Normalize(mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.4]),
    "MixUp": lambda: MixUp(0.4, num_classes=7),
    "CutMix": lambda: CutMix(num_classes=7),
}


def clips_of(name: str, size: int = 6, frames: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(3)
    images = torch.nn.functional.interpolate(torch.rand(size * frames, 3, 8, 10, generator=generator), size=(24, 30), mode="bicubic").clamp(0, 1)
    images = images if name in FLOATS else (images * 255).round().to(torch.uint8)
    return {"image": images.unflatten(0, (size, frames)), "label": torch.arange(size) % 7}


def test_channels_come_before_time_for_a_model_of_clips():
    batch = clips_of("Normalize")
    moved = ChannelsBeforeTime()(batch)["image"]
    assert moved.is_contiguous()
    assert torch.equal(moved, batch["image"].permute(0, 2, 1, 3, 4))
    with pytest.raises(ConfigError, match="requires clips"):
        ChannelsBeforeTime()({"image": batch["image"][:, 0]})
