"""Every choice of the `transforms` group for classified images, built and applied to images as the loader and the step would."""

from __future__ import annotations

import io
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from torchvision.transforms import v2

from samewise.datasets.parts.encoded import EncodedImages
from samewise.recipes.classification import Classification
from samewise.runner.data import streams
from samewise.runner.interfaces import Batch

FOLDER = files("samewise.configs") / "transforms"
CHOICES = sorted(entry.name.removesuffix(".yaml") for entry in FOLDER.iterdir() if entry.name.endswith(".yaml"))
NORMALISING = [choice for choice in CHOICES if "numeric.Normalize" in (FOLDER / f"{choice}.yaml").read_text()]  # the others have tests of their own
IMAGES = ["none", *(choice for choice in NORMALISING if choice != "clips")]
SIZES = {"imagenet": (224, 224), "imagenet_v2": (176, 224), "imagenet_on_device": (224, 224), "imagenet_v2_on_device": (176, 224)}


def build(choice: str, split: str, **overrides: Any) -> tuple[list[Any], list[Any]]:
    config = OmegaConf.create({"seed": 0, "dataset": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.3], "num_classes": 6}})
    config.transforms = OmegaConf.merge(OmegaConf.create((FOLDER / f"{choice}.yaml").read_text()), overrides)
    OmegaConf.resolve(config)
    return tuple(list(instantiate(config.transforms[split][level], _convert_="all")) for level in ("sample", "batch"))  # type: ignore[return-value]


def apply(choice: str, split: str, overrides: dict[str, Any] | None = None, *, varied: bool, size: int = 32) -> Batch:
    sample, batch = build(choice, split, **(overrides or {}))
    random = np.random.default_rng(0)
    samples = []
    with streams.scope(0, "step", 0):
        for number in range(8):
            pixels = random.integers(0, 256, (size + 9 * number, size + 40, 3) if varied else (size, size, 3), dtype=np.uint8)
            image: Any = Image.fromarray(pixels)
            if choice.endswith("_on_device"):
                image.save(held := io.BytesIO(), "JPEG")
                image = EncodedImages.from_file(held.getvalue(), "a.jpg", mode="rgb")
            one: Any = {"image": image, "label": number % 6}
            samples.append(v2.Compose(sample)(one) if sample else one)
        made = Classification(num_classes=6).collate(samples) | {"place": torch.tensor([(0, number) for number in range(8)])}
        for transform in batch:
            made = transform(made)
    return made


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("choice", [choice for choice in IMAGES if choice not in ("none", *SIZES)])
def test_small_images_keep_their_size_and_come_out_normalised(choice: str, split: str):
    batch = apply(choice, split, varied=False)
    assert batch["image"].shape == (8, 3, 32, 32)
    assert batch["image"].dtype == torch.float32
    expected = (0.5 - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor([0.2, 0.2, 0.3])  # uniform pixels have a mean of 0.5
    if split == "eval":
        torch.testing.assert_close(batch["image"].mean(dim=(0, 2, 3)), expected, atol=0.05, rtol=0)


@pytest.mark.parametrize("choice", SIZES)
def test_photographs_of_any_size_come_out_at_the_published_sizes(choice: str):
    for split, side in zip(("train", "eval"), SIZES[choice], strict=True):
        batch = apply(choice, split, varied=True, size=180)
        assert batch["image"].shape == (8, 3, side, side)
        assert batch["label"].shape == ((8, 6) if "imagenet_v2" in choice and split == "train" else (8,))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_clips_of_any_size_come_out_cropped_with_channels_before_time(split: str):
    sample, batch = build("clips", split)
    clips = [torch.randint(256, (4, 3, 90 + 10 * number, 200), dtype=torch.uint8) for number in range(3)]
    made = Classification(num_classes=6).collate([v2.Compose(sample)({"image": clip, "label": 0}) for clip in clips])
    for transform in batch:
        made = transform(made)
    assert made["image"].shape == (3, 3, 4, 112, 112)
    assert made["image"].dtype == torch.float32


def test_evaluation_draws_nothing_random():
    for choice in IMAGES:
        sample, batch = build(choice, "eval")
        made = {"image": torch.zeros(2, 3, 32, 32, dtype=torch.uint8), "label": torch.zeros(2, dtype=torch.long)}
        assert not any(type(transform).__name__.startswith("Random") for transform in (*sample, *batch))
        for transform in batch:
            assert transform.draw(made, 2) == {}
            made = transform(made)
