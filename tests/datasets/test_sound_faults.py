"""Recordings that would be read otherwise than they are: each reader refuses them, or warns, with the file's name."""

import io
import json
import struct
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from samewise.datasets.labelled_recordings import LabelledRecordings
from samewise.datasets.librimix import LibriMix
from samewise.datasets.libritts import LibriTTS
from samewise.datasets.manifest import Manifest
from samewise.datasets.parts import recordings
from samewise.datasets.parts.audio_files import audio_info, read_audio
from samewise.datasets.speaker_mixtures import SpeakerMixtures
from samewise.datasets.speech_commands import SpeechCommands
from samewise.datasets.spoken_digits import SpokenDigits
from samewise.datasets.wav_folder import WavFolder
from samewise.datasets.yesno import YesNo
from samewise.runner.errors import DataError

RATE = 8000
NOISE = 0.3 * np.random.default_rng(0).uniform(-1, 1, (4000, 2)).astype("float32")


def encode(samples: np.ndarray, form: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format=form, subtype=subtype)
    return file.getvalue()


def wav(length: int | None = None, rest: bytes = b"", sound: bytes = NOISE[:, 0].tobytes()) -> bytes:
    """A WAV file of 32-bit floats whose header says another length."""
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 3, 1, RATE, 4 * RATE, 4, 32)
    body = head + b"data" + struct.pack("<I", len(sound) if length is None else length) + sound + rest
    return b"RIFF" + struct.pack("<I", len(body)) + body


OTHER = encode(NOISE[:3000, 0], "OGG")
MP3, OGG, OPUS, AU = (encode(NOISE[:, 0], form, subtype) for form, subtype in (("MP3", None), ("OGG", None), ("OGG", "OPUS"), ("AU", None)))
MORE, SEVERAL, SHORT = "has more sound than its header says", "is several Ogg files in sequence", "is cut short"


@pytest.mark.parametrize(
    ("content", "message"),
    {
        "half": (wav(8000), f"{MORE}: 8000 bytes follow the 8000 bytes of sound; hint: if they are sound: ffmpeg -ignore_length 1"),
        "zero": (wav(0), f"{MORE}: 16000 bytes follow the 0 bytes"),
        "silence after it": (wav(0, sound=bytes(4000) + NOISE[:, 0].tobytes()), MORE),
        "two files": (wav() + wav(), MORE),
        "two chunks": (wav(rest=b"data" + struct.pack("<I", 4000) + NOISE[:1000, 0].tobytes()), MORE),
        "two AU files": (AU + AU, MORE),
        "two MP3 files": (MP3 + MP3, MORE),
        "two tagged MP3 files": (MP3 + b"ID3\3\0\0\0\0\0\0" + MP3, MORE),
        "half an MP3": (MP3[: len(MP3) // 2], f"{SHORT}: {len(MP3) // 2} of the {len(MP3)} bytes"),
        "half a long WAV": (encode(NOISE, "RF64")[:9000], SHORT),
        "two Ogg files": (OGG + OTHER, SEVERAL),
        "two Opus files": (OPUS + OTHER, SEVERAL),
    }.values(),
)
def test_a_file_with_less_or_more_sound_than_its_header_says_is_refused_by_its_header(tmp_path, capfd, content, message):
    path = tmp_path / "a.wav"
    path.write_bytes(content)
    for read in (audio_info, read_audio):
        with pytest.raises(DataError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: {message}")
    assert capfd.readouterr().err == "", "libmpg123 would write there"


def test_an_mp3_with_tags_has_the_length_that_its_encoder_wrote(tmp_path):
    (tmp_path / "a.mp3").write_bytes(b"ID3\3\0\0\0\0\1\5" + bytes(133) + MP3 + b"TAG" + bytes(125))
    (tmp_path / "b.mp3").write_bytes(MP3)
    assert audio_info(tmp_path / "a.mp3").frames == 4000
    assert torch.equal(read_audio(tmp_path / "a.mp3")[0], read_audio(tmp_path / "b.mp3")[0])


def test_libsndfiles_words_come_last(tmp_path):
    (tmp_path / "a.flac").write_bytes(encode(NOISE, "FLAC")[:9000])
    with pytest.raises(DataError, match=r"a\.flac: is damaged or cut short \(libsndfile: .*lost sync\)"):
        read_audio(tmp_path / "a.flac")


def test_encoded_channels_cancel_each_other_too(tmp_path):
    (tmp_path / "a.mp3").write_bytes(encode(np.stack([NOISE[:, 0], -NOISE[:, 0]], axis=1), "MP3"))
    assert read_audio(tmp_path / "a.mp3", mono=False)[0].abs().max() > 0.2
    with pytest.raises(DataError, match=r"a\.mp3: has channels in opposite phase"):
        read_audio(tmp_path / "a.mp3")


def test_the_mean_of_other_channels_and_loud_samples_are_as_they_were(tmp_path):
    """Inverted, but not as loud: the mean is a tenth as loud as the channels. Peaks of 23 dB above full scale occur."""
    stereo = np.stack([NOISE[:, 0], -0.8 * NOISE[:, 0]], axis=1)
    soundfile.write(tmp_path / "a.wav", stereo, RATE, subtype="FLOAT")
    assert read_audio(tmp_path / "a.wav")[0].numpy() == pytest.approx(stereo.mean(1), abs=1e-7)
    soundfile.write(tmp_path / "b.wav", 47 * NOISE[:, 0], RATE, subtype="FLOAT")
    assert read_audio(tmp_path / "b.wav")[0].abs().max() > 14


def write(root: Path, names: list[str], content: bytes) -> list[Path]:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return [root / name for name in names]


def listed(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def manifest(root: Path, content: bytes, **line: float) -> Manifest:
    write(root, ["a.wav"], content)
    listed(root, "list.jsonl", json.dumps({"audio": "a.wav", "text": "a", **line}))
    return Manifest(file=str(root / "list.jsonl"), sample_rate=RATE)


def speech_commands(root: Path, content: bytes) -> SpeechCommands:
    folder = "SpeechCommands/speech_commands_v0.02"
    write(root, [f"{folder}/up/a_nohash_0.wav"], content)
    for name in ("validation_list", "testing_list"):
        listed(root, f"{folder}/{name}.txt", "")
    return SpeechCommands(root=str(root), split="train", sample_rate=RATE)


def libritts(root: Path, content: bytes) -> LibriTTS:
    write(root, ["dev-clean/1/2/a.wav"], content)
    return LibriTTS(root=str(root), subsets=["dev-clean"], samples=100, context=10, sample_rate=RATE)


def wav_folder(root: Path, content: bytes) -> WavFolder:
    write(root, ["a.wav"], content)
    return WavFolder(root=str(root), samples=100, context=10, sample_rate=RATE, cache="memory")


def labelled(root: Path, content: bytes) -> LabelledRecordings:
    write(root, ["x/a.wav"], content)
    return LabelledRecordings(root=str(root), split="train", shares={}, seconds=0.1, sample_rate=2 * RATE)


def spoken_digits(root: Path, content: bytes) -> SpokenDigits:
    write(root, ["3_ann_7.wav"], content)
    return SpokenDigits(root=str(root), sample_rate=RATE)


def yesno(root: Path, content: bytes) -> YesNo:
    write(root, [f"waves_yesno/0_0_0_0_0_0_{name}.wav" for name in ("0_0", "0_1", "1_0")], content)
    return YesNo(root=str(root), split="train", sample_rate=RATE)


def librimix(root: Path, content: bytes) -> LibriMix:
    """Only the second source is at fault."""
    folder = root / "Libri2Mix/wav8k/min/dev"
    write(folder, ["mix_clean/a.wav", "s1/a.wav"], encode(NOISE[:, 0]))
    write(folder, ["s2/a.wav"], content)
    return LibriMix(root=str(root), subset="dev", seconds=0.1)


def speaker_mixtures(root: Path, content: bytes) -> SpeakerMixtures:
    write(root, ["ann/a.wav", "bob/a.wav"], content)
    return SpeakerMixtures(root=str(root), seconds=0.1, length=1)


READERS = (*(manifest, speech_commands, libritts, wav_folder, labelled, spoken_digits, yesno, librimix, speaker_mixtures),)
FAULTS = {
    "half": (wav(8000), MORE),
    "opposite": (encode(np.stack([NOISE[:, 0], -NOISE[:, 0]], axis=1)), "has channels in opposite phase, whose mean is silent"),
    "loud": (encode(64 * NOISE[:, 0], subtype="FLOAT"), "has samples far above full scale"),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_reader_refuses_what_it_would_read_otherwise(tmp_path, read, fault):
    content, message = FAULTS[fault]
    with pytest.raises(DataError, match=rf"/[^/ ]+\.(wav|flac): {message}"):
        read(tmp_path, content)[0]


@pytest.mark.parametrize("read", READERS)
def test_each_reader_names_a_silent_recording_once(tmp_path, read, monkeypatch, capsys):
    monkeypatch.setattr(recordings, "_SILENT", bytearray(4096))
    data = read(tmp_path, encode(np.zeros(4000)))
    before = data[0]
    for _ in range(3):
        data[0]
    assert not any(value.any() for key, value in before.items() if key == "waveform")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(set(lines)) == (2 if read is speaker_mixtures else 1)
    assert all(line.startswith(f"warning: {tmp_path}/") and ": is silent: all its samples are 0" in line for line in lines)


def test_a_recording_with_silence_in_it_is_not_silent_and_few_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recordings, "_SILENT", bytearray(4096))
    labelled(tmp_path, encode(np.concatenate([np.zeros(100_000), NOISE[:, 0]])))[0]
    assert capsys.readouterr().err == ""
    for number in range(30):
        recordings.warn_of_silence(f"{number}.wav")
    assert capsys.readouterr().err.count("is silent") == 10


@pytest.mark.parametrize(("duration", "hint"), [(0.7, ""), (500, "; hint: a list has seconds, not milliseconds")])
def test_a_duration_beyond_the_end_is_refused(tmp_path, duration, hint):
    with wave.open(str(tmp_path / "b.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(bytes(range(200)) * 40)
    content = (tmp_path / "b.wav").read_bytes()
    with pytest.raises(DataError) as caught:
        manifest(tmp_path, content, duration=duration)
    expected = f"at least {duration:.3f} s, the end of a listed section"
    assert f"a.wav: is too short for its list{hint or f'; expected: {expected}'}\n    value:    '0.500 s'" in str(caught.value)
    assert manifest(tmp_path, content, duration=0.55)[0]["length"] == 4000, "rounded, or with an encoder's silence"
