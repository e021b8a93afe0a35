"""Assigns each name to a split by a hash of the name and a key.

Adding files does not move other files to another split.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import compress
from unicodedata import normalize

import numpy as np
import numpy.typing as npt

from samewise.runner.errors import ConfigError, DataError

SPLITS = ("valid", "test", "train")


def select_split(
    names: Sequence[str], split: str, shares: Mapping[str, float], *, key: str = "", where: str
) -> list[str]:
    """Return the names that belong to a split, in order; `test` may be empty.

    Args:
        names: Sample names, as in `in_split`.
        split: "train", "valid" or "test".
        shares: Shares of `valid` and `test`, parts of 1.
        key: Another key splits differently.
        where: The data's place, for messages.

    Raises:
        ConfigError, DataError: As in `in_split`.
    """
    return [*compress(names, in_split(names, split, shares, key=key, where=where))]


def in_split(
    names: Iterable[str], split: str, shares: Mapping[str, float], *, key: str = "", where: str
) -> npt.NDArray[np.bool_]:
    """Return for each name whether it belongs to a split; to `test`, none may.

    A hash maps each name to a number in [0, 1). Names below the share of `valid` belong to valid,
    the next to test, the rest to train. So a split has about its share of the names, not exactly;
    and a larger share of `test` takes from `train` alone.

    Args:
        names: Sample names that are the same wherever the data are, as `a/b.jpg` relative to their
            folder.
        split: "train", "valid" or "test".
        shares: Shares of `valid` and `test`, parts of 1.
        key: Another key splits differently.
        where: The data's place, for messages.

    Raises:
        ConfigError: The split does not exist, or the shares are invalid or leave nothing to train
            on.
        DataError: No name belongs to train or valid.
    """
    ConfigError.raise_if(
        split not in SPLITS, "dataset.split", "is not a valid split", split, "train, valid or test"
    )
    valid, test = float(shares.get("valid", 0.0)), float(shares.get("test", 0.0))
    ConfigError.raise_if(
        set(shares) - {"valid", "test"}
        or min(valid, test) < 0
        or valid + test > 1
        or (split == "train" and valid + test == 1),
        "dataset.shares",
        "leave nothing to train on, or are not valid shares",
        dict(shares),
        "{valid: 0.2, test: 0.1}: parts of 1; the rest is for training",
    )
    low, high = {
        "valid": (0.0, valid),
        "test": (valid, valid + test),
        "train": (valid + test, 1.0),
    }[split]
    chosen = np.fromiter((low <= place(name, key) < high for name in names), bool)
    DataError.raise_if(
        not chosen.any() and split != "test",
        where,
        f"none of {len(chosen)} samples belongs to the split {split}",
        dict(shares),
        hint="raise dataset.shares.valid, or set dataset.key to another string"
        if split == "valid"
        else "set dataset.key to another string",
    )
    return chosen


def place(name: str, key: str) -> float:
    """Return a name's number in [0, 1)."""
    return (
        # 48 bits are exact in a float64; names that are not valid UTF-8 are hashed by their bytes.
        # A file system may have decomposed an accent
        int.from_bytes(
            blake2b(
                f"{key}\0{normalize('NFC', name)}".encode("utf-8", "surrogateescape"),
                digest_size=6,
            ).digest(),
            "big",
        )
        / 2**48
    )
