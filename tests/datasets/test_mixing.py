"""Mixup and cutmix of a batch, compared with torchvision's."""

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
