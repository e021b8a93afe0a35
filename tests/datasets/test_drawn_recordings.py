"""Readers of recordings give what plain independent ones read from odd files, or name the file."""

import io
import struct
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import samewise_datasets_drawn as drawn
import soundfile
import torch
from pyarrow import parquet
from samewise_datasets_drawn import Case, Near, Refused, cell, judge, refuse, text_of

from samewise.datasets.hugging_face import HuggingFaceRecordings
from samewise.datasets.labelled_recordings import LabelledRecordings
from samewise.datasets.librispeech import LibriSpeech
from samewise.datasets.ljspeech import LJSpeech
from samewise.datasets.manifest import Manifest
from samewise.datasets.parts.audio_files import read_audio
from samewise.datasets.speaker_mixtures import SpeakerMixtures
from samewise.datasets.wsj0_mix import WSJ0Mix

RATE = 8000
FORMS = {
    "WAV": ["PCM_16", "PCM_16", "PCM_24", "PCM_32", "PCM_U8", "FLOAT", "DOUBLE", "ULAW"],
    "WAVEX": ["PCM_16", "PCM_24", "FLOAT"],
    "FLAC": ["PCM_16", "PCM_24"],
    "OGG": ["VORBIS"],
    "AIFF": ["PCM_16", "FLOAT"],
    "AU": ["PCM_16", "ULAW"],
}
ENDINGS = {"WAV": ".wav", "WAVEX": ".wav", "FLAC": ".flac", "OGG": ".ogg", "AIFF": ".aiff"}
ENDINGS |= {"AU": ".au"}


def draw_sound(case: Case, frames: int, *, form: str = "", rate: int = RATE, share: float = 0.03) -> tuple[bytes, str]:
    """Return a recording's content, and its usual ending."""
    form = form or case.pick(["WAV", "WAV", *ENDINGS])
    channels = case.pick([1, 1, 2, 3])
    numbers = np.random.default_rng(case.random.randrange(1 << 16))
    samples = numbers.uniform(-0.9, 0.9, (frames, channels))
    file = io.BytesIO()
    subtype = case.pick(FORMS[form])
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    raw = file.getvalue()
    if form == "WAV" and case.pick([False] * 4 + [True]):
        raw = with_chunks(case, raw)
    if case.pick([False], [True], share=share):
        raw = tamper(case, raw, form)
    return raw, ENDINGS[form]


def with_chunks(case: Case, raw: bytes) -> bytes:
    """Return a WAV with further chunks before or after its sound."""
    chunk = case.pick([b"LIST\x04\0\0\0INFO", b"bext\x03\0\0\0abc\0", b"junk\0\0\0\0"])
    place = case.pick([12, len(raw)])
    raw = raw[:place] + chunk + raw[place:]
    return raw[:4] + struct.pack("<I", len(raw) - 8) + raw[8:]


def tamper(case: Case, raw: bytes, form: str) -> bytes:
    """Return a recording whose header is wrong."""
    if form == "FLAC" and case.pick([True, False]):
        # As written into a pipe: the number of samples is unknown
        return raw[:21] + bytes([raw[21] & 0xF0, 0, 0, 0, 0]) + raw[26:]
    if form not in ("WAV", "WAVEX"):
        return drawn.damage(case, raw, share=1)
    data = raw.find(b"data")
    length = struct.unpack("<I", raw[data + 4 : data + 8])[0]
    place, value = case.random.choice(
        [
            *((data + 4, struct.pack("<I", x)) for x in (0, 1, length // 2, length - 1, length + 1)),
            *((data + 4, struct.pack("<I", x)) for x in (length * 2, 0xFFFFFFFF, 0x7FFFF000)),
            *((4, struct.pack("<I", x)) for x in (0, 20, len(raw), 0xFFFFFFFF)),
            *((22, struct.pack("<H", x)) for x in (0, 1, 2, 255)),
            *((24, struct.pack("<I", x)) for x in (0, 1, 7, 4_000_000_000)),
            *((32, struct.pack("<H", x)) for x in (0, 1, 3)),
            *((34, struct.pack("<H", x)) for x in (0, 8, 12, 20, 24) if raw[20] == 1),
            *((20, struct.pack("<H", x)) for x in (0, 2, 3, 85)),
            (16, struct.pack("<I", 18)),
        ]
    )
    return raw[:place] + value + raw[place + len(value) :]


class Stream(soundfile.SoundFile):
    """File that is read from its beginning to its end."""

    def seekable(self) -> bool:
        return False


def blocks_of(file: Stream) -> Iterator[np.ndarray]:
    while len(block := file.read(4096, always_2d=True)):
        yield block


def sound_of(raw: bytes) -> tuple[np.ndarray, int]:
    """Return float64[T, C] and the rate of a recording.

    Raises:
        Refused: It is none, or its header contradicts its content.
    """
    if raw.startswith(b"RIFF"):
        return wav_of(raw)
    with drawn.refusing(soundfile.LibsndfileError, MemoryError, ValueError, TypeError), Stream(io.BytesIO(raw)) as file:
        rate, count = file.samplerate, file.frames
        is_known = 0 <= count < 1 << 40
        blocks = [file.read(count, always_2d=True)] if is_known else [*blocks_of(file)]
        samples = np.concatenate(blocks)
    refuse(is_known and count != len(samples), "another length than its header says")
    refuse(not len(samples) or not np.isfinite(samples).all(), "no sound")
    return samples, rate


KINDS = {(1, 8): "u1", (1, 16): "<i2", (1, 32): "<i4", (3, 32): "<f4", (3, 64): "<f8"}


def wav_of(raw: bytes) -> tuple[np.ndarray, int]:
    """Return float64[T, C] and the rate of a WAV, chunk by chunk."""
    place, form, data = 12, b"", None
    while place + 8 <= len(raw):
        name, length = struct.unpack("<4sI", raw[place : place + 8])
        place += 8
        if name == b"data" and data is None:
            is_open = length in (0xFFFFFFFF, 0x7FFFF000)
            data = raw[place:] if is_open else raw[place : place + length]
            refuse(len(data) < length and not is_open, "cut short")
            length = len(data)
        elif name == b"fmt ":
            form = raw[place : place + length]
        elif not name.isascii() or not name.decode().isprintable():
            raise Refused("something that is no chunk")
        place += length + length % 2
    refuse(len(raw[12:8]) or data is None or len(form) < 16 or raw[8:12] != b"WAVE", "no sound")
    tag, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    tag = struct.unpack("<H", form[24:26])[0] if tag == 0xFFFE and len(form) >= 26 else tag
    # As Python's `wave`, which counts a frame's bytes itself
    width = channels * ((bits + 7) // 8)
    refuse(not width or not rate or len(data) < width, "an impossible header")
    data = data[: len(data) // width * width]
    if tag == 7 and bits == 8:
        header = b".snd" + struct.pack(">IIIII", 24, len(data), 1, rate, channels)
        with drawn.refusing(soundfile.LibsndfileError):
            return soundfile.read(io.BytesIO(header + data), always_2d=True)[0], rate
    bits = (bits + 7) // 8 * 8
    if (tag, bits) == (1, 24):
        parts = np.frombuffer(data, "u1").reshape(-1, 3).astype(np.int32)
        numbers = (parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16) << 8
        return (numbers / 2.0**31).reshape(-1, channels), rate
    refuse((tag, bits) not in KINDS, "another encoding")
    numbers = np.frombuffer(data, KINDS[tag, bits]).astype(np.float64)
    if tag == 1:
        numbers = (numbers - 128) / 128 if bits == 8 else numbers / 2.0 ** (bits - 1)
    refuse(not np.isfinite(numbers).all() or np.abs(numbers).max() > 16, "samples that are no sound")
    return numbers.reshape(-1, channels), rate


def mono_of(raw: bytes, rate: int | None = RATE, start: int = 0, frames: int | None = None) -> np.ndarray:
    """Return float32[T] of a recording's channels' mean, at a rate."""
    samples, own_rate = sound_of(raw)
    mono = torch.from_numpy(samples.astype(np.float32)).mean(1)[start:][:frames]
    if rate is None or own_rate == rate:
        return mono.numpy()
    refuse(own_rate > 384_000 or own_rate * rate > 10**10, "a rate too high")
    refuse(not len(mono), "no sound")
    from torchaudio.functional import resample

    return resample(mono, own_rate, rate).numpy()


def audio_file(case: Case) -> bool:
    raw, ending = draw_sound(case, case.pick([400, 1, 5, 4801]), share=0.5)
    path = case.folder / f"a{ending}"
    path.write_bytes(drawn.damage(case, raw, share=0.1))

    def reference() -> Any:
        samples, rate = sound_of(path.read_bytes())
        return [Near(samples.T, 1e-6), rate]

    return judge(case, lambda: read_audio(path, mono=False), reference)


def labelled(case: Case) -> bool:
    root, listed = case.folder / "sounds", list[str]()
    for name in case.words(case.pick([2, 3])):
        (root / name).mkdir(parents=True)
        for number in range(case.pick([2, 3])):
            raw, ending = draw_sound(case, case.pick([400, 300, 799]))
            word = case.pick(["a", "b#", "e\u0301"])
            listed.append(f"{name}/{number} {word}{ending}")
            (root / listed[-1]).write_bytes(raw)
        if case.pick([True, False]):
            (root / name / case.pick(["._a.wav", "notes.txt", ".hidden.wav"])).write_text("x")
    if case.pick([True, False]):
        (root / "__MACOSX").mkdir()
        (root / "__MACOSX" / "a.wav").write_text("x")
    case.sound = False

    def read() -> Any:
        options: Any = {"shares": drawn.SHARES, "seconds": 0.1, "sample_rate": RATE}
        place = case.spell(root)
        data = [LabelledRecordings(root=place, split=split, **options) for split in drawn.SPLITS]
        assert data[0].fingerprint() == LabelledRecordings(root=str(root), split="train", **options).fingerprint()
        samples = [[split[index] for index in range(len(split))] for split in data]
        for split in samples:
            for sample in split:
                sample["class"] = data[0].classes[sample["label"]]
        return [sorted(split, key=lambda x: x["name"]) for split in samples]

    def reference() -> Any:
        classes = {unicodedata.normalize("NFC", x.partition("/")[0]) for x in listed}
        refuse(len(classes) < len({x.partition("/")[0] for x in listed}), "classes look the same")
        splits = drawn.splits_of(listed)
        return [[labelled_sample(root, name, training=x == "train") for name in sorted(splits[x])] for x in drawn.SPLITS]

    return judge(case, read, reference)


def clip(mono: np.ndarray, frames: int, *, training: bool = True) -> dict[str, Any]:
    """Return a sample of so many frames; of a longer recording, training draws which."""
    start = max(0, len(mono) - frames) // 2
    padded = np.pad(mono[start:][:frames], (0, max(0, frames - len(mono))))
    length = {"length": min(len(mono), frames)}
    return length if training and start else {**length, "waveform": Near(padded, 1e-6)}


def labelled_sample(root: Path, name: str, *, training: bool) -> dict[str, Any]:
    sample = clip(mono_of((root / name).read_bytes()), 800, training=training)
    return {"class": name.partition("/")[0], "name": name, **sample}


TEXTS = ["hello", "It's", "caf\u00e9", "cafe\u0301", "a  b ", "A", "\u00c9t\u00e9"]
LETTERS = " 'abcdefghijklmnopqrstuvwxyz\u00e9"


def transcript_of(text: str) -> str:
    letters = " ".join(unicodedata.normalize("NFC", text).lower().split())
    refuse(set(letters) - set(LETTERS), "an unknown letter")
    return letters


def manifest(case: Case) -> bool:
    folder = case.folder / "data"
    folder.mkdir()
    with_sections = case.pick([True, False])
    rows = list[dict[str, Any]]()
    for word in case.words(4):
        rate = case.pick([RATE, RATE, 16000])
        raw, ending = draw_sound(case, case.pick([rate // 2, rate]), rate=rate, share=0.02)
        (folder / f"{word}{ending}").write_bytes(raw)
        for _ in range(case.pick([1, 2]) if with_sections else 1):
            text = case.pick(TEXTS, ["x1", '"a"', 'say "x"', None, "\u0130"], share=0.02)
            row = {"audio": drawn.path_in_list(case, folder, f"{word}{ending}"), "text": text}
            odd = ["1,5", "nan", "", None, -1.0, "x", 1e12, 400, 1e400, True]
            if with_sections:
                row |= {"offset": case.pick([0, 0.1, 0.125], odd, share=0.01)}
            row |= {"duration": case.pick([0.1, 0.25] if with_sections else [0, 1, 0.5], odd, share=0.01)}
            rows.append(row)
    opening = drawn.write_table(case, folder / "list", rows, tab_quotes=False)
    case.sound = case.sound and not any("duration" in x and not with_sections for x in rows)

    def read() -> Any:
        data = Manifest(file=case.spell(opening["path"]), sample_rate=RATE, letters=LETTERS)
        assert data.fingerprint() == Manifest(file=str(opening["path"]), sample_rate=RATE, letters=LETTERS).fingerprint()
        return [data[index] for index in range(len(data))]

    return judge(case, read, lambda: manifest_samples(folder, drawn.table_rows(**opening)))


def manifest_samples(folder: Path, rows: list[dict[str, Any]]) -> Any:
    times = [[seconds_of(row.get(key)) for key in ("offset", "duration")] for row in rows]
    has_offsets = any(begin for begin, _ in times)
    refuse(has_offsets and not all(length for _, length in times), "a section without an end")
    samples = list[dict[str, Any]]()
    for row, (begin, length) in zip(rows, times, strict=True):
        raw = (folder / drawn.identity(folder, cell(row, "audio"))).read_bytes()
        own, rate = sound_of(raw)
        total = len(own) / rate
        refuse(begin + length > total + (0.01 if has_offsets else 0.1), "too short")
        is_whole = not has_offsets and (not length or length >= total - 0.1)
        section = (0, None) if is_whole else (round(begin * rate), round(length * rate))
        text = row.get("text")
        refuse(not isinstance(text, str | int | float), "no text")
        waveform = mono_of(raw, RATE, *section)
        refuse(not len(waveform), "no sound")
        sample = {"waveform": Near(waveform, 1e-5), "length": len(waveform)}
        samples.append({**sample, "transcript": transcript_of(str(text))})
    return samples


def seconds_of(value: Any) -> float:
    refuse(isinstance(value, bool), "no seconds")
    with drawn.refusing(TypeError, ValueError, OverflowError):
        seconds = float(value or 0)
    refuse(not 0 <= seconds < 1e9, "no seconds")
    return seconds


def librispeech(case: Case) -> bool:
    root = case.folder / "LibriSpeech"
    chapters = list[tuple[str, str]]()
    for speaker in case.pick([["84", "174"], ["1272"], ["9", "10"]]):
        for chapter in case.pick([["7", "121123"], ["5"]]):
            folder = root / "dev-clean" / speaker / chapter
            folder.mkdir(parents=True)
            lines = list[str]()
            for number in range(2):
                name = f"{speaker}-{chapter}-{number:04}"
                raw, _ = draw_sound(case, 400, form="FLAC", share=0.01)
                (folder / f"{name}.flac").write_bytes(raw)
                text = case.pick(["HELLO", "IT'S A", "CAF\u00c9"], ["", "X1", "A\tB"], share=0.02)
                mark = case.pick([" "], ["\t", "  ", ""], share=0.01)
                lines.append(f"{name}{mark}{text}")
            lines += case.pick([[]], [["none HELLO"], lines[:1]], share=0.01)
            case.write(folder / f"{speaker}-{chapter}.trans.txt", "\n".join(lines))
            if case.pick([True, False]):
                (folder / f"._{speaker}-{chapter}.trans.txt").write_bytes(b"\0\x05\x16\x07\xff")
            chapters.append((speaker, chapter))

    def read() -> Any:
        options: Any = {"subsets": ["dev-clean"], "sample_rate": RATE, "letters": LETTERS}
        data = LibriSpeech(root=case.spell(root), **options)
        assert data.fingerprint() == LibriSpeech(root=str(case.folder), **options).fingerprint()
        return [data[index] for index in range(len(data))]

    def reference() -> Any:
        samples = list[dict[str, Any]]()
        for speaker, chapter in sorted(chapters, key=lambda x: (int(x[0]), int(x[1]))):
            folder = root / "dev-clean" / speaker / chapter
            names = set[str]()
            for line in text_of(folder / f"{speaker}-{chapter}.trans.txt").split("\n"):
                if line.strip():
                    name, _, text = line.partition(" ")
                    if name in names or not (path := folder / f"{name}.flac").is_file():
                        raise Refused("missing, or listed twice")
                    names.add(name)
                    waveform = Near(mono_of(path.read_bytes()), 1e-6)
                    samples.append({"waveform": waveform, "transcript": transcript_of(text)})
        return samples

    return judge(case, read, reference)


def ljspeech(case: Case) -> bool:
    root = case.folder / "LJSpeech-1.1"
    (root / "wavs").mkdir(parents=True)
    lines = list[str]()
    for number in range(6):
        name = f"LJ001-{number:04}"
        raw, _ = draw_sound(case, case.pick([400, 300]), form="WAV", share=0.01)
        (root / "wavs" / f"{name}.wav").write_bytes(raw)
        text = case.pick(['Text, "a"', "caf\u00e9", ""])
        lines.append(f"{name}|{text}|b")
    lines += case.pick([[]], [["none|a|b"], lines[:1]], share=0.03)
    case.write(root / "metadata.csv", "\n".join(lines))

    def read() -> Any:
        options: Any = {"samples": 800, "context": 8, "sample_rate": RATE, "valid_every": 2}
        splits = [LJSpeech(root=case.spell(root), split=x, **options) for x in drawn.SPLITS[:2]]
        return [[split[index] for index in range(len(split))] for split in splits]

    def reference() -> Any:
        listed = [line.partition("|")[0] for line in text_of(root / "metadata.csv").split("\n") if line.strip()]
        if len(set(listed)) < len(listed) or not {*listed} <= {x.stem for x in (root / "wavs").iterdir()}:
            raise Refused("missing, or listed twice")
        samples = [lj_sample(root / "wavs" / f"{name}.wav") for name in listed]
        return [samples[::2], samples[1::2]]

    return judge(case, read, reference)


def lj_sample(path: Path) -> dict[str, Any]:
    waveform = mono_of(path.read_bytes())
    if len(waveform) > 800:
        return {"name": path.name}
    padded = np.pad(waveform, (8, 808 - len(waveform)))
    return {"name": path.name, "waveform": Near(padded, 1e-6)}


def mixtures(case: Case) -> bool:
    root = case.folder / "2speakers"
    folder = root / "wav8k" / "min" / "tr"
    stems = [f"{word}_{number}" for number, word in enumerate(case.words(2))]
    for part in ("mix", "s1", "s2"):
        (folder / part).mkdir(parents=True)
        for stem in stems:
            frames = case.pick([400], [399, 401, 1], share=0.01)
            rate = case.pick([RATE], [16000], share=0.01)
            raw, _ = draw_sound(case, frames, form="WAV", rate=rate, share=0.01)
            if case.pick([True], [False], share=0.01):
                (folder / part / f"{stem}.wav").write_bytes(raw)
        if case.pick([True, False]):
            (folder / part / case.pick(["._a.wav", "list.txt"])).write_text("x")

    def read() -> Any:
        data = WSJ0Mix(root=case.spell(root), split="train")
        assert data.fingerprint() == WSJ0Mix(root=str(case.folder), split="train").fingerprint()
        return [data[index] for index in range(len(data))]

    def reference() -> Any:
        samples = list[dict[str, Any]]()
        for name in sorted(x.name for x in (folder / "mix").glob("[!.]*.wav")):
            files = [folder / part / name for part in ("mix", "s1", "s2")]
            refuse(not all(file.is_file() for file in files), "a part is missing")
            sounds = [sound_of(file.read_bytes()) for file in files]
            if {rate for _, rate in sounds} != {RATE} or len({len(x) for x, _ in sounds}) > 1:
                raise Refused("another rate or length")
            mixture, *sources = (mono_of(file.read_bytes()) for file in files)
            arrays = {"mixture": Near(mixture, 1e-6), "sources": Near(np.stack(sources), 1e-6)}
            samples.append({**arrays, "length": len(mixture), "name": name})
        refuse(not samples, "no mixtures")
        return samples

    return judge(case, read, reference)


def speakers(case: Case) -> bool:
    root, names = case.folder / "speakers", case.words(3)
    for name in names:
        (root / name).mkdir(parents=True)
        for number in range(2):
            raw, ending = draw_sound(case, 800, share=0.02)
            (root / name / f"{number}{case.pick([ending, ending.upper()])}").write_bytes(raw)
    (root / case.pick(["__MACOSX", ".cache"])).mkdir()

    def read() -> Any:
        options: Any = {"length": 2, "seconds": 0.1, "fixed": True, "levels": [0, 0]}
        data = SpeakerMixtures(root=case.spell(root), **options)
        assert data.fingerprint() == SpeakerMixtures(root=str(root), **options).fingerprint()
        samples = [data[index] for index in range(len(data))]
        for sample in samples:
            level = sample["sources"].square().mean(1).sqrt()
            np.testing.assert_allclose(sample["mixture"], sample["sources"].sum(0), atol=1e-6)
            assert all(x == 0 or abs(x - 0.05) < 1e-5 for x in level)
        return data.speakers

    return judge(case, read, lambda: sorted(names))


def rows_of_recordings(case: Case) -> bool:
    root = case.folder / "rows"
    root.mkdir()
    rows = [{"audio": {"bytes": draw_sound(case, 400)[0]}, "label": x} for x in case.words(3)]
    if case.pick([False], [True], share=0.1):
        rows[1] = case.pick([{**rows[1], "label": None}, {**rows[1], "audio": None}])
    parquet.write_table(pa.Table.from_pylist(rows), root / "train.parquet")

    def read() -> Any:
        options: Any = {"split": "train", "seconds": 0.1, "sample_rate": RATE, "shares": {}}
        data = HuggingFaceRecordings(root=case.spell(root), **options)
        return [{**x, "class": data.classes[x["label"]]} for x in map(data.__getitem__, range(3))]

    def reference() -> Any:
        return [{"class": cell(row, "label"), **clip(mono_of((row["audio"] or {}).get("bytes", b"")), 800)} for row in rows]

    return judge(case, read, reference)


@pytest.mark.parametrize(
    ("test", "share"),
    [
        *((audio_file, 0.06), (labelled, 0.04), (manifest, 0.08), (librispeech, 0.04)),
        *((ljspeech, 0.02), (mixtures, 0.02), (speakers, 0.01), (rows_of_recordings, 0.01)),
    ],
)
def test_recordings(tmp_path: Path, test: Any, share: float) -> None:
    drawn.try_cases(tmp_path, test, share=share)
