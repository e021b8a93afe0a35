"""Recordings whose file names give their class."""

from pathlib import Path

import pytest
import soundfile
import torch

from samewise.datasets.labelled_recordings import LabelledRecordings
from samewise.runner.errors import ConfigError, DataError

SHARES = {"valid": 0.3, "test": 0.2}


def tone(path: Path, frames: int = 800) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, torch.linspace(0.01, 0.9, frames).numpy(), 8000, subtype="FLOAT")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten recordings by each of three speakers, in a folder for each of two classes."""
    for speaker in ("ann", "bob", "cy"):
        for number in range(10):
            tone(tmp_path / ("dog", "cat")[number % 2] / f"{speaker}_{number}.wav", 700 + 20 * number)
    return tmp_path


def load(root: Path, split: str = "train", **options: object) -> LabelledRecordings:
    return LabelledRecordings(root=str(root), split=split, **{"shares": SHARES, "seconds": 0.1, "sample_rate": 8000, **options})  # type: ignore[arg-type]


def names(data: LabelledRecordings) -> list[str]:
    return [data[index]["name"] for index in range(len(data))]


def test_recordings_of_one_group_stay_together_and_a_pattern_may_fix_the_splits(root: Path) -> None:
    pattern = "(?P<label>[^/]+)/(?P<group>[a-z]+)_.+"
    speakers = [{name.split("/")[1].split("_")[0] for name in names(load(root, split, pattern=pattern, key="a"))} for split in ("train", "valid")]
    assert speakers == [{"ann"}, {"bob"}]
    fixed = "(?P<label>[^/]+)/[a-z]+_((?P<valid>[01])|[0-9])[.]wav"
    assert {name[-5] for name in names(load(root, "valid", pattern=fixed))} == {"0", "1"}
    assert {name[-5] for name in names(load(root, "train", pattern=fixed))} == set("23456789")
    assert len(load(root, "test", pattern=fixed)) == 0


def test_faults_are_reported_with_what_to_set(root: Path) -> None:
    with pytest.raises(DataError, match=r"has 2 classes \(cat, dog\)(.|\n)*dataset\.num_classes=2"):
        load(root, num_classes=3)
    with pytest.raises(DataError, match=r"belongs to an unknown class(.|\n)*did you mean 'dogs'"):
        load(root, classes=["cat", "dogs"])
    with pytest.raises(ConfigError, match=r"\(\?P<label>"):
        load(root, pattern=".+")
    with pytest.raises(DataError, match="a folder for each class"):
        load(root, pattern="(?P<label>[^/]+)/.+[.]flac")


def test_what_is_left_out_is_said(root: Path) -> None:
    assert load(root).left_out == ""
    (root / "cow").mkdir()
    for number in range(3):
        (root / "cow" / f"{number}.amr").write_bytes(b"#!AMR")
    assert "3 .amr" in load(root).left_out
    with pytest.raises(DataError, match=r"has 2 classes \(cat, dog\); hint: are recordings of a class among 3 \.amr"):
        load(root, num_classes=3)
    with pytest.raises(DataError, match=r"matches no recording there; hint: there is only 3 \.amr"):
        load(root / "cow")
