"""Splits that are decided for each name separately."""

import pytest

from samewise.datasets.parts.keyed_split import SPLITS, select_split
from samewise.runner.errors import ConfigError, DataError

NAMES = [f"folder/{number}" for number in range(2000)]
SHARES = {"valid": 0.2, "test": 0.1}


def split(names: list[str], key: str = "", shares: dict[str, float] = SHARES) -> dict[str, list[str]]:
    return {one: select_split(names, one, shares, key=key, where="here") for one in SPLITS}


def test_each_name_is_in_one_split_and_each_split_has_about_its_share() -> None:
    found = split(NAMES)
    assert sorted(name for names in found.values() for name in names) == sorted(NAMES)
    assert 0.17 < len(found["valid"]) / len(NAMES) < 0.23
    assert 0.08 < len(found["test"]) / len(NAMES) < 0.12


def test_added_names_move_none_and_a_larger_test_split_takes_from_training() -> None:
    few, many = split(NAMES[500:700]), split(NAMES)
    assert all(set(few[one]) <= set(many[one]) for one in SPLITS)
    larger = split(NAMES, shares={"valid": 0.2, "test": 0.3})
    assert larger["valid"] == many["valid"]
    assert set(many["test"]) < set(larger["test"])


def test_invalid_shares_and_splits_and_an_empty_split_are_refused() -> None:
    for shares in ({"valid": 0.6, "test": 0.4}, {"valid": -0.1}, {"vaild": 0.1}):
        with pytest.raises(ConfigError, match=r"dataset\.shares"):
            select_split(NAMES, "train", shares, where="here")
    with pytest.raises(ConfigError, match="train, valid or test"):
        select_split(NAMES, "val", SHARES, where="here")
    with pytest.raises(DataError, match=r"none of 2000 samples belongs to the split valid(.|\n)*raise dataset.shares.valid"):
        select_split(NAMES, "valid", {}, where="here")
    assert select_split(NAMES, "test", {"valid": 0.2}, where="here") == []
