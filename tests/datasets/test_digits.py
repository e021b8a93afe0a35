"""The digits that scikit-learn ships."""

from samewise.datasets.digits import Digits


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
