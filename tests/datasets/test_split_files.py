"""Splits: of the files of a Hugging Face data set, as the library `datasets` gives them, so that test rows never become training rows; and of each name by itself."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from samewise.datasets.parts.keyed_split import SPLITS, in_split, place, select_split
from samewise.datasets.parts.split_files import files_by_split
from samewise.runner.errors import ConfigError, DataError

README = "---\nlicense: mit\n{}\nsize_categories:\n- n<1K\n---\n# Birds\n"


def splits(root: Path, files: Sequence[str], configs: str = "") -> dict[str, list[str]]:
    """The names of the files, which are written first, by split."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    if configs:
        (root / "README.md").write_text(README.format(configs))
    return {split: [file.relative_to(root).as_posix() for file in some] for split, some in files_by_split(root).items()}


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.clean-00000-of-00001.parquet", "test.clean-00000-of-00001.parquet"),
        ("train.clean/0000.parquet", "test.clean/0000.parquet"),
        ("data/train-00000-of-00001-8f2a.parquet", "data/test-00000-of-00001-8f2a.parquet"),
    ],
)
def test_a_word_between_dashes_dots_digits_and_spaces_says_the_split(train: str, test: str, tmp_path: Path) -> None:
    assert splits(tmp_path, [train, test]) == {"train": [train], "test": [test]}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["train.parquet", "a/more.parquet"], "other files say which split they are of, but not a/more.parquet"),
        (["train/test-0.parquet", "train/1.parquet"], "has two splits in its name: 'test-0' says test but 'train' says train"),
        (["data/val-00000-of-00001.parquet", "data/dev-00000-of-00001.parquet"], "has 2 splits that mean valid"),
        (["data/train.a-00000-of-00001.parquet", "data/train.b-00000-of-00001.parquet"], "has no split for training"),
    ],
)
def test_names_that_are_not_clear_are_refused(files: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        splits(tmp_path, files)
    assert words in str(caught.value)


FILES = ["a/one.parquet", "a/test.parquet", "a/deep/three.parquet", "b/four.parquet"]


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ("configs:\n- config_name: c\n- config_name: d", r"lists 2 data sets, its configs; hint: datasets.load_dataset\('.*', 'c'\)"),
        ("configs:\n- config_name: x\n  data_files: ../*.parquet", "lists files for train that are not here"),
        ("configs: [", "has a list of configs that cannot be read"),
        ("configs:\n- config_name: x\n  data_files: [{split: train, path: a/*}, {split: train, path: b/*}]", "a split is listed twice"),
        pytest.param("configs: [" + "1, " * 100_000, "longer than 100,000 characters", id="long"),
    ],
)
def test_a_readme_that_does_not_say_it_is_refused(configs: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "beside.parquet").touch()
    with pytest.raises(DataError, match=words):
        splits(tmp_path / "data", FILES, configs)


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


def test_a_split_of_many_names_takes_few_bytes_for_each_while_it_is_made() -> None:
    names = [f"{number:016x}" for number in range(20_000)]
    tracemalloc.start()
    chosen = in_split(iter(names), "valid", {"valid": 0.2}, key="other", where="here")
    assert tracemalloc.get_traced_memory()[1] < 3 * len(names)
    tracemalloc.stop()
    assert chosen.tolist() == [place(name, "other") < 0.2 for name in names]
