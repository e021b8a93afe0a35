"""What holds for every batched transform: a batch gives what its samples give, inputs are unchanged, choices follow the stream."""

import io
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from samewise.datasets.parts.encoded import EncodedImages
from samewise.datasets.transforms.affine import RandomAffine
from samewise.datasets.transforms.clips import ChannelsBeforeTime
from samewise.datasets.transforms.colour import ColorJitter, RandomGrayscale
from samewise.datasets.transforms.erasing import RandomErasing
from samewise.datasets.transforms.geometry import (
    AlternatingHorizontalFlip,
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from samewise.datasets.transforms.mixing import CutMix, MixUp, MixUpOrCutMix
from samewise.datasets.transforms.numeric import Normalize, ToFloat
from samewise.datasets.transforms.policies import RandAugment, TrivialAugmentWide
from samewise.recipes.classification import Classification
from samewise.runner.config import schema
from samewise.runner.data import streams
from samewise.runner.data.keyed import Key, KeyedDataset
from samewise.runner.data.loading import Loader
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Batch, BatchTransform

MAKERS: dict[str, Callable[[], BatchTransform]] = {
    "ToFloat": ToFloat,
    "Normalize": lambda: Normalize(mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.4]),
    "RandomHorizontalFlip": RandomHorizontalFlip,
    "RandomVerticalFlip": RandomVerticalFlip,
    "RandomCrop": lambda: RandomCrop(20, padding=3),
    "RandomCrop reflected": lambda: RandomCrop([18, 30], padding=4, padding_mode="reflect"),
    "RandomResizedCrop": lambda: RandomResizedCrop(24),
    "CenterCrop": lambda: CenterCrop(16),
    "Resize": lambda: Resize(16),
    "RandomErasing": lambda: RandomErasing(0.7),
    "RandomAffine": lambda: RandomAffine(20, translate=(0.1, 0.2), scale=(0.8, 1.3), shear=10, fill=0.5),
    "ColorJitter": lambda: ColorJitter(brightness=0.5, contrast=0.5, saturation=0.5),
    "RandomGrayscale": lambda: RandomGrayscale(0.5),
    "RandAugment": RandAugment,
    "TrivialAugmentWide": lambda: TrivialAugmentWide(interpolation="bilinear"),
}
MIXING: dict[str, Callable[[], BatchTransform]] = {
    "MixUp": lambda: MixUp(0.4, num_classes=7),
    "CutMix": lambda: CutMix(num_classes=7),
    "MixUpOrCutMix": lambda: MixUpOrCutMix(num_classes=7),
}
BYTES_ONLY = {"ColorJitter", "RandAugment", "TrivialAugmentWide"}
FLOATS_ONLY = {"Normalize", *MIXING}
ALL = {**MAKERS, **MIXING}
CASES = [
    (name, dtype)
    for name in ALL
    for dtype in ("uint8", "float32")
    if (name, dtype) not in {(n, "float32") for n in BYTES_ONLY} | {(n, "uint8") for n in FLOATS_ONLY}
]


def batch_of(dtype: str, size: int = 48) -> Batch:
    generator = torch.Generator().manual_seed(3)
    smooth = torch.nn.functional.interpolate(torch.rand(size, 3, 8, 10, generator=generator), size=(32, 40), mode="bicubic").clamp(0, 1)
    images = (smooth * 255).round().to(torch.uint8) if dtype == "uint8" else smooth
    return {"image": images, "label": torch.randint(7, (size,), generator=generator), "index": torch.arange(size)}


def one(batch: Batch, position: int) -> Batch:
    return {name: value[position : position + 1] for name, value in batch.items()}


def draw_choices(transform: BatchTransform, batch: Batch, seed: int = 0) -> dict[str, Tensor]:
    with streams.scope(seed, "step", 5, 0):
        return transform.draw(batch, len(batch["image"]))


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[0] in MAKERS])
def test_a_batch_gives_what_its_samples_give_one_by_one(name: str, dtype: str):
    transform, batch = MAKERS[name](), batch_of(dtype)
    choices = draw_choices(transform, batch)
    together = transform.apply(batch, choices)["image"]
    alone = torch.cat([transform.apply(one(batch, k), {key: value[k : k + 1] for key, value in choices.items()})["image"] for k in range(len(together))])
    assert together.dtype == alone.dtype
    if dtype == "uint8" and name != "ToFloat":
        assert torch.equal(together, alone)
    else:
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_cuda_gives_what_the_cpu_gives(name: str, dtype: str):
    batch = batch_of(dtype)
    there = {key: value.cuda() for key, value in batch.items()}
    choices, choices_there = draw_choices(ALL[name](), batch), draw_choices(ALL[name](), there)
    assert all(torch.equal(value, choices_there[key]) and not choices_there[key].is_cuda for key, value in choices.items())
    here, there = ALL[name]().apply(batch, choices), ALL[name]().cuda().apply(there, choices)
    assert there["image"].is_cuda
    difference = (here["image"].double() - there["image"].cpu().double()).abs()
    if dtype == "uint8" and name != "ToFloat":
        # A level by rounding; and single pixels, where a sampling point falls between two.
        assert (difference > 1).double().mean() < 2e-3
    else:
        assert difference.max() < 1e-4
    torch.testing.assert_close(here["label"], there["label"].cpu())


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_given_batch_is_unchanged_and_other_keys_pass_through(name: str, dtype: str):
    transform, batch = ALL[name](), batch_of(dtype)
    copy = {key: value.clone() for key, value in batch.items()}
    changed = transform(batch)
    assert changed is not batch
    assert all(torch.equal(batch[key], copy[key]) for key in batch)
    assert changed["index"] is batch["index"]
    assert list(changed) == list(batch)
    if name not in MIXING:
        assert changed["label"] is batch["label"]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_choices_and_result_depend_only_on_the_stream(name: str, dtype: str):
    batch = batch_of(dtype)
    results = []
    for _ in range(2):
        torch.rand(17)  # whatever was drawn before
        with streams.scope(1, "step", 8, 2):
            results.append(ALL[name]()(batch))
    assert torch.equal(results[0]["image"], results[1]["image"])
    assert torch.equal(results[0]["label"], results[1]["label"])


def test_every_transform_runs_with_deterministic_algorithms():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for name, dtype in CASES:
            ALL[name]()(batch_of(dtype))
    finally:
        torch.use_deterministic_algorithms(before)


def flips_in_epoch(epoch: int, seed: int = 0, *, workers: int = 0) -> list[bool]:
    """Whether each image, by index, is flipped in an epoch, which has its own order of samples."""
    images = [{"image": torch.arange(2.0).expand(1, 1, 2), "number": number} for number in range(2000)]
    keyed = KeyedDataset(images, torch.utils.data.default_collate, seed=0, stream="sample")
    keyed.says_places = True
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(epoch)).tolist()
    keys = [Key(epoch, start, tuple(order[start : start + 500])) for start in range(0, 2000, 500)]
    transform, seen = AlternatingHorizontalFlip(seed), dict[int, bool]()
    for batch in Loader(keyed, lambda: iter(keys), schema.Loader(num_workers=workers)):
        torch.rand(3)
        made = transform(batch)
        assert made["place"] is batch["place"]
        seen |= dict(zip(batch["number"].tolist(), (made["image"][:, 0, 0, 0] == 1).tolist(), strict=True))
    return [seen[number] for number in range(2000)]


def test_two_epochs_in_a_row_show_each_image_once_each_way():
    epochs = [flips_in_epoch(epoch) for epoch in range(4)]
    assert epochs[0] == epochs[2] == [not one for one in epochs[1]] == [not one for one in epochs[3]]
    assert 900 < sum(epochs[0]) < 1100  # half, within four and a half deviations
    assert 900 < sum(one == other for one, other in zip(epochs[0], epochs[0][1:], strict=False)) < 1100  # and neighbours are independent of each other


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
