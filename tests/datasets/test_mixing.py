"""Mixup and cutmix of a batch, compared with torchvision's."""

from __future__ import annotations

import torch
from samewise_datasets_pictured import pictures
from torch import Tensor
from torchvision.transforms import v2

from samewise.datasets.transforms import mixing


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
