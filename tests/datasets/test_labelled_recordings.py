"""Recordings whose file names give their class, and clips of recordings for vocoders."""

from pathlib import Path

import pytest
import soundfile
import torch

from samewise.datasets.labelled_recordings import LabelledRecordings
from samewise.datasets.libritts import LibriTTS
from samewise.datasets.wav_folder import WavFolder
from samewise.runner.data import streams
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


SIZE = {"samples": 100, "context": 30}


def record(path: Path, frames: int = 1000, rate: int = 8000) -> None:
    """Write a ramp, whose values show where a clip lies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, (torch.arange(1, frames + 1) / 2000).numpy(), rate, subtype="FLOAT")


def draw_sample(data, index: int, *numbers: int) -> dict:
    with streams.scope(0, "sample", *numbers):
        return data[index]


def place(sample: dict) -> int:
    """The position in the ramp of the clip's first sample."""
    return round(float(sample["waveform"][30]) * 2000) - 1


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_a_clip_lies_anywhere_in_its_recording_with_its_context(tmp_path, cache):
    record(tmp_path / "a.wav")
    data = WavFolder(root=str(tmp_path), sample_rate=8000, cache=cache, **SIZE)
    places = set()
    for number in range(200):
        sample = draw_sample(data, 0, number)
        assert (sample["waveform"].shape, sample["name"], sample["index"]) == ((160,), "a.wav", 0)
        around = torch.arange(place(sample) - 30, place(sample) + 130)
        inside = (around >= 0) & (around < 1000)
        assert torch.allclose(sample["waveform"], torch.where(inside, (around + 1) / 2000, 0.0), atol=1e-6)
        places.add(place(sample))
    assert min(places) < 40
    assert 860 < max(places) <= 1000 - 100 - 1
    assert torch.equal(draw_sample(data, 0, 7)["waveform"], draw_sample(data, 0, 7)["waveform"])


def test_libritts_has_the_requested_subsets(tmp_path):
    for subset in ("dev-clean", "test-clean"):
        for chapter in ("7", "12"):
            record(tmp_path / "LibriTTS" / subset / "84" / chapter / f"84_{chapter}_000001_000000.wav", 400, rate=24000)
    data = LibriTTS(root=str(tmp_path), subsets=["dev-clean", "test-clean"], **SIZE)
    assert len(data) == 4
    assert data[0]["name"] == "dev-clean/84/12/84_12_000001_000000.wav"
    with pytest.raises(DataError, match=r"this part of LibriTTS was not found"):
        LibriTTS(root=str(tmp_path), subsets=["train-clean-100"], **SIZE)
    with pytest.raises(ConfigError, match="did you mean 'dev-clean'"):
        LibriTTS(root=str(tmp_path), subsets=["devclean"], **SIZE)
