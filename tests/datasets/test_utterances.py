"""Data sets of transcribed recordings: their layouts on disk, transcripts, splits, and what is missing or wrong."""

import json
from pathlib import Path

import pytest
import soundfile
import torch
import torchaudio

from samewise.datasets.manifest import Manifest
from samewise.datasets.parts.utterances import Spelling
from samewise.datasets.speech_commands import SpeechCommands
from samewise.datasets.spoken_digits import SpokenDigits
from samewise.datasets.yesno import YesNo
from samewise.runner.errors import ConfigError, DataError


def record(path: Path, seconds: float = 0.05, rate: int = 16000) -> Path:
    """Write a recording of noise that depends on the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(sum(path.name.encode()))
    soundfile.write(path, torch.rand(round(seconds * rate), generator=draw).sub(0.5).numpy(), rate)
    return path


def test_speech_commands_are_split_by_their_official_lists(tmp_path):
    folder = tmp_path / "SpeechCommands" / "speech_commands_v0.02"
    for name in ("yes/aa_nohash_0.wav", "yes/bb_nohash_0.wav", "up/aa_nohash_1.wav", "up/cc_nohash_0.wav", "_background_noise_/hum.wav"):
        record(folder / name)
    (folder / "validation_list.txt").write_text("yes/bb_nohash_0.wav\n")
    (folder / "testing_list.txt").write_text("up/cc_nohash_0.wav\n")
    splits = {split: SpeechCommands(root=str(tmp_path), split=split) for split in ("train", "valid", "test")}
    spoken = {split: [data[index]["transcript"] for index in range(len(data))] for split, data in splits.items()}
    assert spoken == {"train": ["up", "yes"], "valid": ["yes"], "test": ["up"]}
    with pytest.raises(DataError, match=r"dataset\.download=true"):
        SpeechCommands(root=str(tmp_path / "nowhere"), split="train")


def test_yesno_is_split_and_transcribed(tmp_path):
    for number in range(10):
        record(tmp_path / "waves_yesno" / ("_".join(f"{number:08b}") + ".wav"), rate=8000)
    train, valid = (YesNo(root=str(tmp_path), split=split) for split in ("train", "valid"))
    assert (len(train), len(valid)) == (8, 2)
    assert valid[0]["transcript"] == "no no no no no yes no no"
    record(tmp_path / "waves_yesno" / "maybe.wav")
    with pytest.raises(DataError, match=r"maybe.wav: is not a recording of YesNo"):
        YesNo(root=str(tmp_path), split="train")


@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize("rate", [8000, 16000])
def test_lines_with_an_offset_are_sections_as_nemo_reads_them(tmp_path, cache, rate):
    """Its AudioSegment seeks to the offset, reads the duration at the file's rate, and then resamples."""
    record(tmp_path / "long.wav", 0.5, rate=8000)
    lines = [{"offset": 0.1, "duration": 0.2}, {"offset": 0, "duration": 0.05}, {"offset": 0.45, "duration": 0.0505}]
    path = tmp_path / "list.jsonl"
    path.write_text("\n".join(json.dumps({"audio": "long.wav", "text": "a", **line}) for line in lines))
    data = Manifest(file=str(path), sample_rate=rate, cache=cache)
    whole, _ = soundfile.read(tmp_path / "long.wav", dtype="float32")
    for place, (start, stop) in enumerate([(800, 2400), (0, 400), (3600, 4000)]):
        expected = torch.from_numpy(whole[start:stop].copy())
        expected = expected if rate == 8000 else torchaudio.functional.resample(expected, 8000, rate)
        assert torch.allclose(data[place]["waveform"], expected, atol=1e-6)
        assert data[place]["length"] == len(expected) == data._recordings.frames(place)
    assert len(data._recordings.stretch(1, 10, 10_000)) == len(data[1]["waveform"]) - 10, "not beyond the section"
    path.write_text(path.read_text().replace("0.45", "0.44"))
    assert Manifest(file=str(path), sample_rate=rate, cache=cache).fingerprint() != data.fingerprint()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", 'audio,text\nsound/one.wav,a\nsound/one.wav,"b\nsound/two.wav,c\n', r"a\.csv:3: has a line break in the column 'text'"),
        ("a.csv", "audio,text\nsound/one.wav,naïve\n", r"one\.wav: the transcript has an unknown letter, LATIN SMALL LETTER I WITH DIAERESIS"),
        ("a.csv", "audio,texts\nsound/one.wav,a\n", "did you mean 'texts'"),
        ("a.csv", "audio,text\nsound/one.wav,a, b\n", "a.csv:2: .*quotes"),
        ("a.csv", "audio,text\nsound/three.wav,a\n", r"sound/three\.wav: is listed in a\.csv but missing"),
        ("a.csv", "audio,text\nSound/one.wav,a\n", r"Sound/one\.wav: is listed in a\.csv but missing; hint: the list has 'Sound', the folder 'sound'"),
        ("a.csv", "audio,text\n", "has no rows"),
        (
            "a.txt",
            "sound/one.wav|one\nsound/two.wav|two\n",
            "a.txt:2: has no column 'audio', only .*; hint: (?!one of).*the first line of a table names its columns",
        ),
        ("a.jsonl", '{"audio": "sound/one.wav", "text": "a"}\n{"audio"\n', "a.jsonl:2: is not JSON"),
        ("a.csv", None, "cannot be read"),
    ],
)
def test_a_manifest_with_a_fault_is_named_before_training(tmp_path, name, content, message):
    for word in ("one", "two"):
        record(tmp_path / "sound" / f"{word}.wav", rate=8000)
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        Manifest(file=str(tmp_path / name))


def digits(root: Path) -> Path:
    for digit in range(3):
        for speaker in ("ann", "bob"):
            for take in (0, 4, 5, 49):
                record(root / "recordings" / f"{digit}_{speaker}_{take}.wav", seconds=0.02 + 0.01 * digit, rate=8000)
    return root


def test_spoken_digits_are_split_by_takes(tmp_path):
    train, test = (SpokenDigits(root=str(digits(tmp_path)), takes=takes) for takes in ([5, 49], [0, 4]))
    assert (len(train), len(test)) == (12, 12)
    assert not {train[index]["name"] for index in range(12)} & {test[index]["name"] for index in range(12)}
    assert train[0]["transcript"] == "zero"
    assert train.speakers == ["ann", "bob"]
    assert len(SpokenDigits(root=str(tmp_path), speakers=["bob"])) == 12
    assert len(train[0]["waveform"]) == 160


def test_sequences_of_spoken_digits_follow_the_random_stream(tmp_path):
    data = SpokenDigits(root=str(digits(tmp_path)), digits=[2, 3], pause=[0.01, 0.02])
    for seed in range(10):
        torch.manual_seed(seed)
        sample = data[3]
        names, words = sample["name"].split("+"), sample["transcript"].split()
        assert 2 <= len(names) == len(words) <= 3
        assert names[0] == data.path(3).name
        assert len({name.split("_")[1] for name in names}) == 1
        spoken = sum(soundfile.info(tmp_path / "recordings" / name).frames for name in names)
        assert 80 * (len(names) - 1) <= sample["length"] - spoken <= 160 * (len(names) - 1)
        torch.manual_seed(seed)
        assert torch.equal(data[3]["waveform"], sample["waveform"])


def test_capitals_are_made_small_as_the_alphabet_has_them():
    turkish = Spelling(letters=" abc\u00e7defg\u011fh\u0131ijklmno\u00f6prs\u015ftu\u00fcvyz")
    assert turkish("I\u015eIK \u0130STANBUL", "a.wav") == "\u0131\u015f\u0131k istanbul"
    assert Spelling()("ISTANBUL", "a.wav") == "istanbul"


def test_letters_are_composed_as_transcripts_are():
    with pytest.raises(ConfigError, match=r"dataset\.letters: writes an accent apart from its letter \(spelt with U\+0301 COMBINING ACUTE ACCENT\)"):
        Spelling(letters="abce\u0301f")
    assert Spelling(letters="acef\u00e9")("cafe\u0301", "a.wav") == "caf\u00e9"
    assert Spelling(ignore="e\u0301")("fete\u0301", "a.wav") == "fet", "an e is not left out"
