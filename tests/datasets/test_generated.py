"""Data sets that need no files of the user's: generated images, scikit-learn's digits, digits on canvases."""

import torch
from torch import nn

from samewise.datasets.digits import Digits
from samewise.datasets.digits_on_canvas import DigitsOnCanvas
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


def test_the_splits_together_are_scikit_learns_digits():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    parts = [Digits(split=split).batch(range(length)) for split, length in (("train", 1442), ("valid", 355))]
    ours = sorted((int(label), *image.flatten().tolist()) for part in parts for image, label in zip(part["image"], part["label"], strict=True))
    expected = sorted((int(label), *(image.flatten().astype(int) * 255 // 16).tolist()) for image, label in zip(theirs.images, theirs.target, strict=True))
    assert ours == expected


def test_holding_out_writers_takes_the_end_of_the_file():
    from sklearn.datasets import load_digits

    valid = Digits(split="valid", hold_out="writers")
    assert len(valid) == 360
    assert valid.batch(range(360))["label"].tolist() == load_digits().target[-360:].tolist()
    assert len(Digits(split="train", hold_out="writers")) == 1437


def test_aspect_ratios_tell_which_canvases_are_turned():
    data = DigitsOnCanvas(split="train", length=30, turned=True)
    ratios = data.aspect_ratios().tolist()
    assert ratios == [data[index]["image"].shape[2] / data[index]["image"].shape[1] for index in range(30)]
    assert set(ratios) == {96 / 128, 128 / 96}
