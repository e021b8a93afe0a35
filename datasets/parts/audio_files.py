"""Decodes audio files to tensors: WAV, FLAC, MP3 and OGG by soundfile, which needs no system libraries; other formats by torchcodec if it works."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import soundfile
import torch
import torchaudio
from torch import Tensor

from samewise.datasets.parts.file_kinds import another_kind, names_other_files
from samewise.datasets.parts.limits import FILTER, SAMPLE_RATE, SAMPLES, list_below, require_regular
from samewise.runner.errors import ConfigError, DataError, Problem, first_few

EXTENSIONS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".au", ".m4a", ".aac")
"""The file names that are audio."""

_FORMATS = "a recording: a WAV, FLAC, MP3 or OGG file"
_UNKNOWN_FORMAT = 1  # SF_ERR_UNRECOGNISED_FORMAT of libsndfile
_SIZE_UNKNOWN = (0, 0x7FFFF000, 0xFFFFFFFF)  # what programs that write into a pipe leave in a header; the second is SoX

_LENGTH_UNKNOWN = 1 << 62
"""From so many frames on, libsndfile means that the header does not say: FLAC that was written into a pipe."""

_ENDLESS = 1 << 50
"""Bytes beyond the end of any file."""

_RUN_UP = {"MPEG_LAYER_III": 32 * 1152, "VORBIS": 255 * 4096} | dict.fromkeys(
    ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM"), 0
)
"""The samples to decode before the first that is wanted; from the beginning on in the other encodings.

An MP3's frame uses bits of frames before it. libsndfile misjudges where the last page of an Ogg Vorbis file begins, if it seeks into it: a page ends at most
255 packets, of at most 4096 samples. An Opus frame depends on all frames before it; in GSM 6.10 and several ADPCMs libsndfile cannot seek.
"""

_CHUNKS = {"WAV": ("<4sI", b"data"), "WAVEX": ("<4sI", b"data"), "AIFF": (">4sI", b"SSND")}
"""How the header of a chunk is packed, and the name of the chunk with the sound."""

_OGG_PAGE, _OGG_LAST = 65_307, 4
"""The most bytes of a page, and the flag of a stream's last page."""

_BLOCK = 1 << 16


@dataclass(frozen=True)
class AudioInfo:
    """The content of a file's header. `frames` counts samples of one channel."""

    frames: int
    sample_rate: int
    channels: int

    @property
    def seconds(self) -> float:
        return self.frames / self.sample_rate

    def frames_at(self, sample_rate: int) -> int:
        """The frames that `read_audio` returns for the whole file at another rate."""
        if sample_rate == self.sample_rate:
            return self.frames
        common = math.gcd(sample_rate, self.sample_rate)
        new, old = sample_rate // common, self.sample_rate // common
        # torchaudio cuts to a length in float32, which may be a few samples more or less than the exact one, but there are no more than its filter gives.
        return min(int(torch.ceil(torch.as_tensor(new * self.frames / old))), new * (self.frames // old + 1))


def audio_preparation(sample_rate: int, *, frames: int | None = None) -> dict[str, Any]:
    """A data set's `preparation`: how a recording becomes its waveform, in evaluation, for those who do it elsewhere."""
    cut = {"samples": frames, "cut": "the middle of a longer recording; silence after a shorter one"} if frames else {}
    return {"sample_rate": sample_rate, "resampling": "torchaudio.functional.resample", "channels": "their mean", "numbers": "float32, full scale 1", **cut}


def read_audio(
    path: str | os.PathLike[str], *, sample_rate: int | None = None, mono: bool = True, start: int = 0, frames: int | None = None
) -> tuple[Tensor, int]:
    """Decode a file, or a section of it, and resample it if its rate differs.

    A section, at the file's own rate, has the samples of that part of the whole, the same bits but for MP3, where they may be rounded otherwise.

    Args:
        path: The file.
        sample_rate: In Hz, what to resample to (by torchaudio's windowed sinc, which is deterministic); None: the file's own.
        mono: Average the channels.
        start: The first frame wanted, counted at the file's own rate.
        frames: How many frames, at the file's own rate; None: all that follow.

    Returns:
        The samples, float32[T] if mono, else float32[C, T], at full scale 1, and their rate in Hz.

    Raises:
        DataError: the file does not exist, or it is empty, cut short, no audio, shorter than the stretch that was asked for, or more than what is decoded
            (`limits`); it names the file. A file that does not say how long it is cannot be found to be cut short: an MP3 without a Xing header, raw AAC, and
            what was written into a pipe.
    """
    try:
        with _open_audio(path) as file:
            _require_resampling(path, file.samplerate, sample_rate)
            samples, rate = _stretch(path, file, start, frames), file.samplerate
    except soundfile.LibsndfileError as error:
        samples, rate = _read_by_torchcodec(path, error)
        samples = samples[:, start : None if frames is None else start + frames]
    if not samples.shape[1] or (frames is not None and samples.shape[1] < frames):
        have = f"{start + samples.shape[1]} frames" if samples.shape[1] else "no frames there"
        wanted = f"{frames} frames from frame {start} on" if frames is not None or start else "sound"
        raise DataError(Problem(os.fspath(path), f"is too short: it has {have}", expected=wanted))
    if not bool(torch.isfinite(samples.sum())):  # a float file may hold anything; the sum of a whole one is finite
        raise DataError(Problem(os.fspath(path), "contains values that are not finite numbers"))
    samples = samples.mean(0) if mono else samples
    if sample_rate is None or sample_rate == rate:
        return samples, rate
    _require_resampling(path, rate, sample_rate)
    SAMPLES.check(path, -(-samples.numel() * sample_rate // rate))
    return _resampler(rate, sample_rate)(samples), sample_rate


def audio_info(path: str | os.PathLike[str]) -> AudioInfo:
    """Read length, rate and channels from the header; a file that does not say its length is decoded once, to count.

    Raises:
        DataError: the file does not exist, or it is empty, cut short or no audio.
    """
    try:
        with _open_audio(path) as file:
            return AudioInfo(file.length, file.samplerate, file.channels)
    except soundfile.LibsndfileError as error:
        samples, rate = _read_by_torchcodec(path, error)
        return AudioInfo(samples.shape[1], rate, samples.shape[0])


def match_audio(folder: Path, pattern: str, *, marks: Mapping[str, str] | None = None, expected: str = "") -> dict[str, re.Match[str]]:
    """The audio files below a folder whose names, in the form of `list_audio`, match `dataset.pattern` completely.

    Args:
        folder: Where they are.
        pattern: A regular expression.
        marks: Groups that it must have, by name, and what each marks, in words.
        expected: What would match, for the message where nothing does.

    Raises:
        ConfigError: the pattern is not a valid regular expression, or lacks a group.
        DataError: the folder does not exist, or no file matches.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(Problem("dataset.pattern", f"is not a valid regular expression: {error}", pattern)) from None
    for group, what in (marks or {}).items():
        if group not in compiled.groupindex:
            raise ConfigError(Problem("dataset.pattern", f"does not mark the {what} in a file's name", pattern, f"a group (?P<{group}>...)"))
    names = list_audio(folder)
    matched = {name: found for name in names if (found := compiled.fullmatch(name))}
    if not matched:
        hint = f"dataset.pattern has to match all of a name: there is {first_few(names, 2)}" if names else "set dataset.root=FOLDER"
        raise DataError(Problem(str(folder), "the pattern matches no recording there", pattern, expected, hint))
    return matched


def list_audio(folder: str | os.PathLike[str], *, extensions: Sequence[str] = EXTENSIONS) -> list[str]:
    """The audio files below a folder, relative to it with "/" between folders, sorted folder by folder, then by name.

    Raises:
        DataError: the folder does not exist, or it cannot be read, or links lead to one twice.
    """
    try:
        return list_below(folder, extensions)
    except OSError as error:
        reason = f"the folder of audio files cannot be read: {error.strerror}"
        raise DataError(Problem(os.fspath(folder), reason, hint="set dataset.root=FOLDER")) from None


class _Sound(soundfile.SoundFile):
    """An open file. `length`, in frames, is right where `frames` is an estimate or unknown."""

    length: int

    def seekable(self) -> bool:
        """False: soundfile would seek after each block that it reads, and an MP3 that goes on there lacks the bits of earlier frames."""
        return False

    def close(self) -> None:
        """Close what it was opened with too."""
        super().close()
        if isinstance(self.name, _Longer):
            self.name.close()


class _Longer:
    """A file for libsndfile that claims to have more bytes than it has: then frames beyond an estimate from its size are read as well."""

    def __init__(self, path: str | os.PathLike[str], more: int) -> None:
        self._file, self._more, self._beyond = open(path, "rb"), more, 0  # noqa: SIM115 (closed with the object)
        self.read, self.readinto, self.close = self._file.read, self._file.readinto, self._file.close

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        self._beyond = self._more if whence == os.SEEK_END else 0
        return self.tell()

    def tell(self) -> int:
        return self._file.tell() + self._beyond


def _open_audio(path: str | os.PathLike[str]) -> _Sound:
    """Open a regular, complete file with a supported rate."""
    _require_file(path)
    file = _Sound(path)
    try:
        _require_whole(path, file.format)
        if file.format != "MP3" and file.subtype == "MPEG_LAYER_III":
            reason, hint = "is MP3 within another format, whose length is unknown", "convert it: ffmpeg -i IN OUT.wav"
            raise DataError(Problem(os.fspath(path), reason, expected=_FORMATS, hint=hint))
        SAMPLE_RATE.check(path, file.samplerate)
        file.length = file.frames
        if file.frames >= _LENGTH_UNKNOWN or (file.format == "MP3" and _is_estimated(path, file.frames)):
            found, is_mp3 = os.stat(path), file.format == "MP3"
            file.close()
            file = _open_unknown(path, is_mp3=is_mp3)
            file.length = _count(os.fspath(path), found.st_size, found.st_mtime_ns, is_mp3=is_mp3)
    except BaseException:
        file.close()
        raise
    return file


def _is_estimated(path: str | os.PathLike[str], frames: int) -> bool:
    """Whether the length of an MP3 depends on the file's size: it has no Xing header."""
    with _Sound(_Longer(path, max(8, os.path.getsize(path) // 200))) as file:
        return file.frames != frames


def _open_unknown(path: str | os.PathLike[str], *, is_mp3: bool) -> _Sound:
    """Open a file that can be read to its end, wherever that is."""
    return _Sound(_Longer(path, _ENDLESS) if is_mp3 else path)


@lru_cache(maxsize=1 << 16)
def _count(path: str, size: int, changed: int, *, is_mp3: bool) -> int:
    """The frames of such a file; one that changes is counted again."""
    with _open_unknown(path, is_mp3=is_mp3) as file:
        return sum(iter(lambda: len(file.read(_BLOCK, dtype="float32", always_2d=True)), 0))


def _require_file(path: str | os.PathLike[str]) -> None:
    try:
        require_regular(path, whole=False)
    except OSError as error:
        raise DataError(Problem(os.fspath(path), f"cannot be read: {error.strerror}")) from None


def _require_resampling(path: str | os.PathLike[str], rate: int, wanted: int | None) -> None:
    """Check the filter's size, which grows with both rates in lowest terms."""
    if wanted is not None and wanted > 0 and rate > 0:
        common = math.gcd(rate, wanted)
        FILTER.check(path, (rate // common) * (wanted // common))


def _stretch(path: str | os.PathLike[str], file: _Sound, start: int, frames: int | None) -> Tensor:
    """float32[C, T] of an open file, T at most `frames`."""
    if not 0 <= start <= file.length:
        raise DataError(Problem(os.fspath(path), f"is too short: it has {file.length} frames", expected=f"more than {start} frames"))
    wanted = file.length - start if frames is None else min(frames, file.length - start)
    SAMPLES.check(path, wanted * file.channels)
    before = min(start, _RUN_UP.get(file.subtype, start))
    if start > before:
        file.seek(start - before)
    while before and (dropped := len(file.read(min(before, _BLOCK), dtype="float32", always_2d=True))):
        before -= dropped
    samples = torch.from_numpy(file.read(wanted, dtype="float32", always_2d=True)).t().contiguous()
    if samples.shape[1] < wanted:
        raise _cut_short(path, f"{start + samples.shape[1]} of the {file.length} frames that its header promises")
    return samples


def _cut_short(path: str | os.PathLike[str], words: str, hint: str = "") -> DataError:
    return DataError(Problem(os.fspath(path), f"is cut short: {words}", hint="; ".join(filter(None, ("remove the file, or download it again", hint)))))


def _require_whole(path: str | os.PathLike[str], form: str) -> None:
    """Refuse a truncated WAV, AIFF, AU or Ogg file, which libsndfile reads without an error."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if form in _CHUNKS:
            begin, length = _find_sound(file, size, *_CHUNKS[form])
        elif form == "AU":
            begin, length = struct.unpack(">II" if file.read(4) == b".snd" else "<II", file.read(8))
        else:
            if form == "OGG" and not _ends_ogg(file, size):
                raise _cut_short(path, "it lacks the last page of an Ogg file", "if this is all there is, write its end: ffmpeg -i IN -c copy OUT.ogg")
            return
    if length not in _SIZE_UNKNOWN and begin + length > size:
        raise _cut_short(path, f"{max(0, size - begin)} of the {length} bytes of sound that its header promises")


def _find_sound(file: BinaryIO, size: int, packing: str, wanted: bytes) -> tuple[int, int]:
    """Where the sound of a file of chunks begins, and how long it should be; (0, 0) if there is none."""
    place = 12
    while place + 8 <= size:
        file.seek(place)
        name, length = struct.unpack(packing, file.read(8))
        place += 8
        if name == wanted:
            return place, length
        place += length + length % 2
    return 0, 0


def _ends_ogg(file: BinaryIO, size: int) -> bool:
    """Whether the last page of an Ogg file is complete, and its stream's last."""
    file.seek(max(0, size - 2 * _OGG_PAGE))
    tail = file.read()
    place = tail.rfind(b"OggS\0")
    if place < 0 or place + 27 > len(tail) or not tail[place + 5] & _OGG_LAST:
        return False
    sizes = tail[place + 27 : place + 27 + tail[place + 26]]
    return len(tail) >= place + 27 + tail[place + 26] + sum(sizes)


def _read_by_torchcodec(path: str | os.PathLike[str], refusal: soundfile.LibsndfileError) -> tuple[Tensor, int]:
    """(float32[C, T], rate) of a file that soundfile refused; if torchcodec refuses it too, the error names the file."""
    name = os.fspath(path)
    try:
        with open(path, "rb"):
            if not os.path.getsize(path):
                raise DataError(Problem(name, "is empty", expected=_FORMATS, hint="remove the file, or download it again"))
    except OSError as error:
        raise DataError(Problem(name, f"cannot be read: {error.strerror}")) from None
    # Imported only for what soundfile does not know: it needs FFmpeg's libraries, which many machines do not have.
    try:
        if refusal.code != _UNKNOWN_FORMAT or names_other_files(path):
            raise ValueError
        from torchcodec.decoders import AudioDecoder  # pyright: ignore[reportMissingImports]

        decoder = AudioDecoder(name)
        rate, channels = decoder.metadata.sample_rate or 1, decoder.metadata.num_channels or 1
        SAMPLE_RATE.check(name, rate)
        SAMPLES.check(name, int((decoder.metadata.duration_seconds_from_header or 0) * rate * channels))
        decoded = decoder.get_samples_played_in_range(0.0, (SAMPLES.most + 1) / (rate * channels))  # headers lie
        SAMPLES.check(name, decoded.data.numel())
        return decoded.data.to(torch.float32), int(decoded.sample_rate)
    except (ImportError, OSError, RuntimeError, ValueError):
        if other := another_kind(path, "recording"):
            raise DataError(Problem(name, f"is {other}, not a recording", expected=_FORMATS)) from None
        reason = "is not audio, or in a format that cannot be read" if refusal.code == _UNKNOWN_FORMAT else f"is a damaged file: {refusal.error_string}"
        other = "torchcodec (pip install 'samewise[video]') with FFmpeg reads further formats, such as M4A; or convert the file"
        hint = other if refusal.code == _UNKNOWN_FORMAT else "download the file again"
        raise DataError(Problem(name, reason, expected=_FORMATS, hint=hint)) from None


@lru_cache(maxsize=16)
def _resampler(from_rate: int, to_rate: int) -> torchaudio.transforms.Resample:
    """Cached, since computing its kernel takes longer than resampling a short file."""
    if min(from_rate, to_rate) < 1:
        raise ConfigError(Problem("dataset.sample_rate", "is not a valid rate", to_rate, "a whole number of Hz greater than 0"))
    return torchaudio.transforms.Resample(from_rate, to_rate)
