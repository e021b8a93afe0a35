"""Every choice of the `transforms` group for classified images, built and applied to images as the loader and the step would."""

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
SIZES = {"imagenet": (224, 224), "imagenet_v2": (176, 224), "imagenet_on_device": (224, 224), "imagenet_v2_on_device": (176, 224), "timm": (224, 224)}


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


@pytest.mark.parametrize("choice", SIZES)
def test_photographs_of_any_size_come_out_at_the_published_sizes(choice: str):
    for split, side in zip(("train", "eval"), SIZES[choice], strict=True):
        batch = apply(choice, split, varied=True, size=180)
        assert batch["image"].shape == (8, 3, side, side)
        assert batch["label"].shape == ((8, 6) if choice in ("imagenet_v2", "imagenet_v2_on_device", "timm") and split == "train" else (8,))
