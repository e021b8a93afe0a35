"""Files of a Hugging Face data set are of the split that the library `datasets` gives them, or there is an error: test rows never become training rows."""

from __future__ import annotations

import json
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
        ("train-0.parquet", "eval-0.parquet"),
        ("Training.parquet", "evaluation_set.parquet"),
        ("train1.parquet", "test1.parquet"),
        ("my train.parquet", "my test.parquet"),
        ("data/train-00000-of-00001-8f2a.parquet", "data/test-00000-of-00001-8f2a.parquet"),
        ("birds-train.arrow", "birds-test.arrow"),
    ],
)
def test_a_word_between_dashes_dots_digits_and_spaces_says_the_split(train: str, test: str, tmp_path: Path) -> None:
    assert splits(tmp_path, [train, test]) == {"train": [train], "test": [test]}


@pytest.mark.parametrize(
    ("train", "other"),
    [
        ("data/train-00000-of-00001.parquet", "data/extra-00000-of-00001.parquet"),
        ("data/train-00000-of-00001.parquet", "data/train.noisy-00000-of-00001.parquet"),
        ("train-00000-of-00001.parquet", "extra-00000-of-00001.parquet"),
        ("default/train/0000.parquet", "default/unsupervised/0000.parquet"),
    ],
)
def test_a_split_of_another_name_is_left_out(train: str, other: str, tmp_path: Path) -> None:
    assert splits(tmp_path, [train, other]) == {"train": [train]}


@pytest.mark.parametrize(
    "files", [["a.parquet", "b/part-3.parquet"], ["data/images-00000-of-00002.parquet", "data/images-00001-of-00002.parquet"], ["data-00000-of-00001.arrow"]]
)
def test_files_that_name_no_split_are_for_training(files: list[str], tmp_path: Path) -> None:
    hidden = [".cache/a.parquet", "__old/b.parquet", ".c.parquet", "cache-0.arrow"]
    assert splits(tmp_path / ".mine", [*files, *hidden]) == {"train": files}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["train.parquet", "a/more.parquet"], "other files say which split they are of, but not a/more.parquet"),
        (["data/extra-00000-of-00001.parquet", "more.parquet"], "other files say which split they are of, but not more.parquet"),
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
    ("configs", "expected"),
    [
        (
            "configs:\n- config_name: x\n  data_files:\n  - split: train\n    path: a/o*\n  - split: dev\n    path:\n    - b/*",
            {"train": FILES[:1], "valid": FILES[3:]},
        ),
        ("configs: [{config_name: x, data_files: [{split: test, path: ./a/*}]}]", {"test": FILES[:2]}),
        ("configs:\n  - config_name: x\n    data_files:\n    - a/**", {"train": FILES[:3]}),
        ("configs:\n- config_name: x\n  data_files: '**/t*.parquet'", {"train": FILES[1:3]}),
        ("configs:\n- config_name: x\n  data_dir: b", {"train": FILES[3:]}),
        ("configs:\n- config_name: x\n  data_dir: a\n- config_name: y\n  default: true\n  data_files: b/four.parquet", {"train": FILES[3:]}),
    ],
)
def test_a_readme_says_which_files_a_split_has(configs: str, expected: dict[str, list[str]], tmp_path: Path) -> None:
    assert splits(tmp_path, FILES, configs) == {split: sorted(files) for split, files in expected.items()}


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ("configs:\n- config_name: a\n  data_dir: a\n- config_name: c\n  data_dir: b", r"lists 2 data sets, its configs; hint: dataset.root=.*/a\n"),
        ("configs:\n- config_name: c\n- config_name: d", r"lists 2 data sets, its configs; hint: datasets.load_dataset\('.*', 'c'\)"),
        ("configs:\n- config_name: x\n  data_files: five.parquet", "lists files for train that are not here"),
        ("configs:\n- config_name: x\n  data_files: ../*.parquet", "lists files for train that are not here"),
        ("configs:\n- config_name: x\n  data_dir: /etc", "lists files for train that are not here"),
        ("configs: [", "has a list of configs that cannot be read"),
        ("configs: &a [*a]", "has a list of configs that cannot be read"),
        ("configs: 1", "has a list of configs that cannot be read"),
        ("configs:\n- config_name: x\n  data_files: [{split: train, path: a/*}, {split: train, path: b/*}]", "a split is listed twice"),
        pytest.param("configs: [" + "[" * 5000, "has a list of configs that cannot be read: RecursionError", id="deep"),
        pytest.param("configs: [" + "1, " * 100_000, "longer than 100,000 characters", id="long"),
    ],
)
def test_a_readme_that_does_not_say_it_is_refused(configs: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "beside.parquet").touch()
    with pytest.raises(DataError, match=words):
        splits(tmp_path / "data", FILES, configs)


def save(root: Path, listed: object, *folders: str) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (root / "dataset_dict.json").write_text(json.dumps(listed))
    return root


def test_a_saved_dictionary_has_the_splits_that_it_lists(tmp_path: Path) -> None:
    """An older save in the same folder left its test split there."""
    assert [*files_by_split(save(tmp_path / "a", {"splits": ["train"]}, "train", "test"))] == ["train"]
    found = files_by_split(save(tmp_path / "b", {"splits": ["extra", "train", "validation"]}, "extra", "train", "validation"))
    assert found == {"train": [tmp_path / "b" / "train" / "data.arrow"], "valid": [tmp_path / "b" / "validation" / "data.arrow"]}
    with pytest.raises(DataError, match=r"has 2 splits that mean valid; hint: .*\n    value: +\['val', 'dev'\]"):
        files_by_split(save(tmp_path / "c", {"splits": ["train", "val", "dev"]}, "train", "val", "dev"))
    with pytest.raises(DataError, match=r"has no split for training; .*\n    value: +\['train.a', 'train.b'\]"):
        files_by_split(save(tmp_path / "d", {"splits": ["train.a", "train.b"]}, "train.a", "train.b"))
