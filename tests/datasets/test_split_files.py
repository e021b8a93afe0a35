"""Files of a Hugging Face data set are of the split that the library `datasets` gives them, or there is an error: test rows never become training rows."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from samewise.datasets.parts.split_files import files_by_split
from samewise.runner.errors import DataError

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
