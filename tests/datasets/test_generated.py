"""Generated images for trying recipes."""

import torch
from torch import nn

from samewise.datasets.generated import GeneratedClassification


def test_the_pixels_are_the_same_on_every_machine():
    made = GeneratedClassification(length=4, size=8, num_classes=2, channels=1)
    assert made.fingerprint() == "bb784eca9b78016d1166a1557560b488"


def test_a_linear_model_learns_them_and_generalises_to_the_other_split():
    torch.manual_seed(0)
    train, valid = (GeneratedClassification(size=16, split=split).batch(range(256)) for split in ("train", "valid"))
    model = nn.Linear(3 * 16 * 16, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(_flat(train["image"])), train["label"]).backward()
        optimizer.step()
    assert (model(_flat(valid["image"])).argmax(1) == valid["label"]).float().mean() > 0.95


def _flat(images: torch.Tensor) -> torch.Tensor:
    return (images.float() / 255 - 0.5).flatten(1)
