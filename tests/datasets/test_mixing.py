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


def test_one_of_mixup_and_cutmix_serves_a_whole_batch():
    transform, kinds = mixing.MixUpOrCutMix(num_classes=5), set()
    for seed in range(20):
        _, choices, ours = mix(transform, seed)
        assert all(len(value.unique()) == 1 for name, value in choices.items() if name != "partner")
        torch.testing.assert_close(ours["label"].sum(1), torch.ones(24))
        kinds.add("mixup" if choices["pixel"][0] < 1 else "cutmix")
    assert kinds == {"mixup", "cutmix"}


def test_labels_that_are_already_soft_are_mixed_directly():
    soft = torch.eye(4)
    batch = {"image": torch.rand(4, 1, 8, 8), "label": soft}
    transform = mixing.MixUp(1.0, num_classes=4)
    choices = transform.draw(batch, 4)
    share = choices["label"][:, None].float()
    torch.testing.assert_close(transform.apply(batch, choices)["label"], share * soft + (1 - share) * soft.roll(1, 0))
