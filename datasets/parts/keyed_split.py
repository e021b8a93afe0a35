"""Assigns each name to a split by a hash of the name and a key, so that adding files does not move
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from samewise.runner.errors import ConfigError, DataError, Problem

SPLITS = ("valid", "test", "train")


def select_split(
    names: Sequence[str], split: str, shares: Mapping[str, float], *, key: str = "", where: str
) -> list[str]:
    """The names that belong to a split, in order; `test` may be empty.

    Each name is a number in [0, 1) by its hash: below the share of `valid` it is valid's, then
    test's, and the rest is train's. So a split has about its share of the names, not exactly; and a
    larger share of `test` takes from `train` alone.

    Args:
        names: Of samples; the same wherever the data are, as `a/b.jpg` relative to their folder.
        split: "train", "valid" or "test".
        shares: Of `valid` and `test`.
        key: Another key splits otherwise.
        where: What errors are about.

    Raises:
        ConfigError: no such split, or shares that are none, or leave none of 1 to the split train.
        DataError: none belongs to train or valid.
    """
    if split not in SPLITS:
        raise ConfigError(
            Problem("dataset.split", "is not a valid split", split, "train, valid or test")
        )
    valid, test = float(shares.get("valid", 0.0)), float(shares.get("test", 0.0))
    if (
        set(shares) - {"valid", "test"}
        or min(valid, test) < 0
        or valid + test > 1
        or (split == "train" and valid + test == 1)
    ):
        words = "leave nothing to train on, or are not valid shares"
        raise ConfigError(
            Problem(
                "dataset.shares",
                words,
                dict(shares),
                "{valid: 0.2, test: 0.1}: parts of 1; the rest is for training",
            )
        )
    low, high = {
        "valid": (0.0, valid),
        "test": (valid, valid + test),
        "train": (valid + test, 1.0),
    }[split]
    chosen = [name for name in names if low <= place(name, key) < high]
    if not chosen and split != "test":
        hint = (
            "raise dataset.shares.valid, or set dataset.key to another string"
            if split == "valid"
            else "set dataset.key to another string"
        )
        raise DataError(
            Problem(
                where,
                f"none of {len(names)} samples belongs to the split {split}",
                dict(shares),
                hint=hint,
            )
        )
    return chosen


def place(name: str, key: str) -> float:
    """A name's number in [0, 1)."""
    return (
        int.from_bytes(
            blake2b(f"{key}\0{name}".encode("utf-8", "surrogateescape"), digest_size=6).digest(),
            "big",
        )
        / 2**48
    )
