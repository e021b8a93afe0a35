"""Recordings whose file names give their class, and clips of recordings for vocoders."""

from pathlib import Path

import pytest
import soundfile
import torch

from samewise.datasets.labelled_recordings import LabelledRecordings
from samewise.datasets.librimix import LibriMix
from samewise.datasets.libritts import LibriTTS
from samewise.datasets.speaker_mixtures import SpeakerMixtures
from samewise.datasets.wav_folder import WavFolder
from samewise.datasets.wsj0_mix import WSJ0Mix
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


RATE = 8000
DIGITS = r"\d_(?P<speaker>[a-z]+)_\d+\.wav"


def record_value(path: Path, frames: int = 1500, *, value: float | None = None, rate: int = RATE, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = 0.1 * torch.randn(frames, generator=torch.Generator().manual_seed(seed))
    soundfile.write(path, (noise if value is None else torch.full((frames,), value)).numpy(), rate, subtype="FLOAT")


def test_a_mixture_is_the_sum_of_two_different_speakers(tmp_path):
    """Each speaker has a constant value, which shows whose recording is heard where."""
    for number, name in enumerate(("ann", "bob", "cy"), start=1):
        for take in range(3):
            record_value(tmp_path / f"{take}_{name}_{take}.wav", 1000 + 300 * take, value=0.1 * number)
    data = SpeakerMixtures(root=str(tmp_path), pattern=DIGITS, length=40, seconds=0.5)
    assert (len(data), data.speakers) == (40, ["ann", "bob", "cy"])
    names = set()
    for index in range(40):
        with streams.scope(0, "sample", 0, index):
            sample = data[index]
        assert (sample["mixture"].shape, sample["sources"].shape, sample["length"]) == ((4000,), (2, 4000), 4000)
        assert torch.equal(sample["mixture"], sample["sources"].sum(0))
        one, other = sample["name"].split()[1].split("+")
        assert one != other
        names.add(frozenset((one, other)))
    assert len(names) == 3


def test_a_speaker_whose_name_is_written_in_two_ways_is_not_two(tmp_path):
    for name in ("Jos\u00e9", "Jose\u0301"):
        record_value(tmp_path / name / "a.wav")
    with pytest.raises(DataError, match=r"has two speaker names that look the same: .*U\+0301"):
        SpeakerMixtures(root=str(tmp_path))


def generate(folder: Path, mixture: str, names: int = 3, *, rate: int = RATE) -> None:
    for number in range(names):
        for part, value in ((mixture, 0.3), ("s1", 0.1), ("s2", 0.2)):
            record_value(folder / part / f"{number}.wav", 4000 + 500 * number, value=value, rate=rate)


def librimix(root: Path, **settings):
    return LibriMix(root=str(root), subset="dev", **settings)


def wsj0_mix(root: Path, **settings):
    return WSJ0Mix(root=str(root), split="valid", **settings)


LAYOUTS = [(librimix, "Libri2Mix/wav8k/min/dev", "mix_clean"), (wsj0_mix, "2speakers/wav8k/min/cv", "mix")]


@pytest.mark.parametrize(("made", "folder", "mixture"), LAYOUTS)
def test_missing_mixtures_are_named(tmp_path, made, folder, mixture):
    with pytest.raises(DataError, match=r"was not found[\s\S]*set dataset.root=FOLDER"):
        made(tmp_path)
    generate(tmp_path / folder, mixture)
    (tmp_path / folder / "s2" / "1.wav").unlink()
    with pytest.raises(DataError, match=r"s2: files of mixtures are missing: 1\.wav"):
        made(tmp_path)


@pytest.mark.parametrize("frames", [4400, 4600])
@pytest.mark.parametrize(("made", "folder", "mixture"), LAYOUTS)
def test_a_source_not_as_long_as_its_mixture_is_named(tmp_path, made, folder, mixture, frames):
    generate(tmp_path / folder, mixture)
    data = made(tmp_path)
    record_value(tmp_path / folder / "s2" / "1.wav", frames)
    for read in (lambda: data[1], lambda: made(tmp_path)):
        with pytest.raises(DataError, match=r"s2/1\.wav: is not as long as its mixture"):
            read()
