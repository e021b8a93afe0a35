"""Each batched transform against torchvision's own, given the same choices."""

from typing import Any

import pytest
import torch
from samewise_datasets_pictured import pictures
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from samewise.datasets.transforms import colour, mixing, policies
from samewise.datasets.transforms.affine import RandomAffine
from samewise.datasets.transforms.erasing import RandomErasing
from samewise.datasets.transforms.geometry import RandomCrop, RandomResizedCrop, Resize
from samewise.datasets.transforms.numeric import Normalize, ToFloat


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def check(ours: Tensor, theirs: Tensor, *, pixels: float = 0.0) -> None:
    """Within one level by rounding, but for a share of pixels whose sampling point falls between two."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    difference = (ours.int() - theirs.int()).abs()
    assert (difference > 1).double().mean() <= pixels
    assert (difference > 0).double().mean() <= max(pixels, 0.01)


def test_to_float_and_normalize():
    images = pictures()
    floats = F.to_dtype(images, torch.float32, scale=True)
    assert torch.equal(ToFloat()({"image": images})["image"], floats)
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    assert torch.equal(Normalize(mean=mean, std=std)({"image": floats})["image"], F.normalize(floats, mean, std))


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
def test_random_crop(mode: str):
    images, transform = pictures(), RandomCrop([28, 32], padding=4, fill=7, padding_mode=mode)
    choices = transform.draw({"image": images}, len(images))
    ours = transform.apply({"image": images}, choices)["image"]
    padded = F.pad(images, [4], fill=7, padding_mode=mode)
    theirs = [F.crop(image, int(top), int(left), 28, 32) for image, top, left in zip(padded, choices["top"], choices["left"], strict=True)]
    assert torch.equal(ours, torch.stack(theirs))


def test_random_resized_crop():
    images, transform = pictures(), RandomResizedCrop(20)
    choices = transform.draw({"image": images}, len(images))
    ours = transform.apply({"image": images}, choices)["image"]
    boxes = zip(*(choices[name].tolist() for name in ("top", "left", "height", "width")), strict=True)
    assert torch.equal(ours, torch.stack([F.resized_crop(image, *box, size=[20, 20]) for image, box in zip(images, boxes, strict=True)]))


@pytest.mark.parametrize("size", [16, [16, 24], 50])
def test_resize(size: Any):
    assert torch.equal(Resize(size)({"image": pictures()})["image"], F.resize(pictures(), size if isinstance(size, list) else [size]))


@pytest.mark.parametrize("value", [0.0, [0.1, 0.2, 0.3]])
def test_random_erasing(value: Any):
    images, transform = pictures().float() / 255, RandomErasing(0.6, value=value)
    choices = transform.draw({"image": images}, len(images))
    ours = transform.apply({"image": images}, choices)["image"]
    fill = torch.tensor(value).view(-1, 1, 1)
    for position, image in enumerate(images):
        top, left, height, width = (int(choices[name][position]) for name in ("top", "left", "height", "width"))
        theirs = F.erase(image, top, left, height, width, fill) if height else image
        assert torch.equal(ours[position], theirs)
    assert 0 < int((choices["height"] == 0).sum()) < len(images)


@pytest.mark.parametrize(("interpolation", "fill"), [("nearest", 0.0), ("nearest", 100.0), ("bilinear", 0.0)])
def test_random_affine(interpolation: str, fill: float):
    images = pictures()
    transform = RandomAffine(30, translate=(0.1, 0.2), scale=(0.7, 1.4), shear=15, interpolation=interpolation, fill=fill)
    choices = transform.draw({"image": images}, len(images))
    ours = transform.apply({"image": images}, choices)["image"]
    theirs = [
        F.affine(
            image,
            angle=float(choices["angle"][k]),
            translate=[float(choices["x"][k]), float(choices["y"][k])],
            scale=float(choices["scale"][k]),
            shear=[float(choices["shear"][k]), 0.0],
            interpolation=v2.InterpolationMode(interpolation),
            fill=[fill] if fill else None,
        )
        for k, image in enumerate(images)
    ]
    check(ours, torch.stack(theirs), pixels=0.002)


@pytest.mark.parametrize(("interpolation", "fill"), [("nearest", 0.0), ("nearest", 99.0), ("bilinear", 0.0)])
def test_every_operation_at_every_magnitude_agrees_with_torchvision(interpolation: str, fill: float):
    transform = policies.TrivialAugmentWide(interpolation=interpolation, fill=fill)
    reference = v2.TrivialAugmentWide(interpolation=v2.InterpolationMode(interpolation), fill=[fill] * 3 if fill else None)
    table = policies.magnitudes(31, shear=0.99, shift=(32.0, 32.0), degrees=135.0, strength=0.99, bits=6)
    images = pictures(31)
    for number, name in enumerate(policies.NAMES):
        for sign in (1, -1) if policies.SIGNED[number] else (1,):
            magnitude = sign * table[number]
            choices = {"operation": torch.full((31, 1), number), "magnitude": magnitude[:, None]}
            ours = transform.apply({"image": images}, choices)["image"]
            theirs = [
                reference._apply_image_or_video_transform(image, name, float(value), interpolation=reference.interpolation, fill=reference._fill)
                for image, value in zip(images, magnitude, strict=True)
            ]
            geometric = name in ("ShearX", "ShearY", "Rotate")
            check(ours, torch.stack(theirs), pixels=0.002 if geometric else 0.0)


def test_color_jitter_applies_its_operations_in_the_drawn_order():
    images, transform = pictures(), colour.ColorJitter(brightness=0.6, contrast=0.6, saturation=0.6)
    choices = transform.draw({"image": images}, len(images))
    ours = transform.apply({"image": images}, choices)["image"]
    functions = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)
    theirs = []
    for image, order, factors in zip(images, choices["order"].tolist(), choices["factor"].tolist(), strict=True):
        for which in order:
            image = functions[which](image, factors[which])
        theirs.append(image)
    difference = (ours.int() - torch.stack(theirs).int()).abs()
    assert difference.max() <= 3
    assert (difference > 0).double().mean() < 0.02
    assert len({tuple(order) for order in choices["order"].tolist()}) == 6


def mix(transform: mixing.Mixing, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(seed)
    images = pictures().float() / 255
    batch = {"image": images, "label": torch.arange(24) % 5}
    choices = transform.draw(batch, 24)
    return batch, choices, transform.apply(batch, choices)


def test_mixup_equals_torchvisions():
    batch, choices, ours = mix(mixing.MixUp(0.4, num_classes=5))
    share = float(choices["pixel"][0])
    reference = v2.MixUp(num_classes=5)
    params = {"labels": batch["label"], "batch_size": 24, "lam": share}
    torch.testing.assert_close(ours["image"], reference.transform(batch["image"], params), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours["label"], reference.transform(batch["label"], params), rtol=1e-6, atol=1e-7)
    assert ours["label"].dtype == torch.float32
    assert 0 < share < 1


def test_cutmix_equals_torchvisions():
    for seed in range(5):
        batch, choices, ours = mix(mixing.CutMix(num_classes=5), seed)
        top, left, height, width = (int(choices[name][0]) for name in ("top", "left", "height", "width"))
        reference = v2.CutMix(num_classes=5)
        share = 1 - height * width / (33 * 40)
        params = {"labels": batch["label"], "batch_size": 24, "box": (left, top, left + width, top + height), "lam_adjusted": share}
        assert torch.equal(ours["image"], reference.transform(batch["image"], params))
        torch.testing.assert_close(ours["label"], reference.transform(batch["label"], params), rtol=1e-6, atol=1e-7)


def test_batches_are_mixed_with_the_given_probability_until_an_epoch():
    transform = mixing.MixUpOrCutMix(mixup_alpha=0.8, cutmix_alpha=0.0, p=0.25, epochs=2, num_classes=5)
    images, label = pictures().float() / 255, torch.arange(24) % 5
    epochs = torch.tensor([0, 1, 2, 3] * 6)
    torch.manual_seed(0)
    shares = list[float]()
    for _ in range(400):
        batch = {"image": images, "label": label, "place": torch.stack([epochs, torch.arange(24)], 1)}
        choices = transform.draw(batch, 24)
        mixed = transform.apply(batch, choices)
        share = float(choices["pixel"][0])
        shares.append(share)
        own = epochs >= 2 if share < 1 else torch.ones(24, dtype=torch.bool)
        changed = (mixed["image"] != images).flatten(1).any(1)
        assert not changed[own].any()
        assert torch.equal(mixed["label"][own], torch.nn.functional.one_hot(label, 5)[own].float())
        assert share == 1 or changed[~own].all()
    # Beta(0.8, 0.8) has the mean 1/2; four standard deviations of a binomial with p = 1/4
    assert 65 <= sum(share < 1 for share in shares) <= 135
    assert transform.needs_places


def test_without_an_alpha_nothing_is_mixed():
    _, choices, _ = mix(mixing.MixUpOrCutMix(mixup_alpha=0.0, cutmix_alpha=0.0, num_classes=5))
    assert (choices["label"] == 1).all()
    assert not choices["height"].any()
