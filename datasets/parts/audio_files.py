"""Decodes audio files to tensors: WAV, FLAC, MP3 and OGG by soundfile, which needs no system
libraries; other formats by torchcodec if it works.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile
import torch
from torch import Tensor

from samewise.datasets.parts.file_kinds import another_kind, names_other_files
from samewise.datasets.parts.folders import SOUNDS, list_files
from samewise.datasets.parts.limits import FILTER, SAMPLE_RATE, SAMPLES
from samewise.datasets.parts.signals import resample, resampled_length
from samewise.datasets.parts.sound import FORMATS, decode_section, open_audio
from samewise.runner.errors import ConfigError, DataError, Problem, first_few

_UNKNOWN_FORMAT = 1  # SF_ERR_UNRECOGNISED_FORMAT of libsndfile


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
        return (
            self.frames
            if sample_rate == self.sample_rate
            else resampled_length(self.frames, self.sample_rate, sample_rate)
        )


def audio_preparation(sample_rate: int, *, frames: int | None = None) -> dict[str, Any]:
    """A data set's `preparation`: how a recording becomes its waveform, in evaluation, for those
    who do it elsewhere.
    """
    cut = (
        {"samples": frames, "cut": "the middle of a longer recording; silence after a shorter one"}
        if frames
        else {}
    )
    return {
        "sample_rate": sample_rate,
        "resampling": "torchaudio.functional.resample",
        "channels": "their mean",
        "numbers": "float32, full scale 1",
        **cut,
    }


def read_audio(
    path: str | os.PathLike[str],
    *,
    sample_rate: int | None = None,
    mono: bool = True,
    start: int = 0,
    frames: int | None = None,
) -> tuple[Tensor, int]:
    """Decode a file, or a section of it, and resample it if its rate differs.

    A section, at the file's own rate, has the samples of that part of the whole, the same bits but
    for MP3, where they may be rounded otherwise.

    Args:
        path: The file.
        sample_rate: In Hz, what to resample to (by a windowed sinc, which is deterministic); None:
            the file's own.
        mono: Average the channels.
        start: The first frame wanted, counted at the file's own rate.
        frames: How many frames, at the file's own rate; None: all that follow.

    Returns:
        The samples, float32[T] if mono, else float32[C, T], at full scale 1, and their rate in Hz.

    Raises: DataError: the file does not exist, or it is empty, cut short, no audio, shorter than
        the stretch that was asked for, or more than what is decoded
            (`limits`); it names the file. A file that does not say how long it is cannot be found
                to be cut short: an MP3 without a Xing header, raw AAC, and
            what was written into a pipe.
    """
    try:
        with open_audio(path) as file:
            _require_resampling(path, file.samplerate, sample_rate)
            samples, rate = decode_section(path, file, start, frames), file.samplerate
    except soundfile.LibsndfileError as error:
        samples, rate = _read_by_torchcodec(path, error)
        samples = samples[:, start : None if frames is None else start + frames]
    if not samples.shape[1] or (frames is not None and samples.shape[1] < frames):
        have = f"{start + samples.shape[1]} frames" if samples.shape[1] else "no frames there"
        wanted = (
            f"{frames} frames from frame {start} on" if frames is not None or start else "sound"
        )
        raise DataError(Problem(os.fspath(path), f"is too short: it has {have}", expected=wanted))
    if not bool(
        torch.isfinite(samples.sum())
    ):  # a float file may hold anything; the sum of a whole one is finite
        raise DataError(Problem(os.fspath(path), "contains values that are not finite numbers"))
    samples = samples.mean(0) if mono else samples
    if sample_rate is None or sample_rate == rate:
        return samples, rate
    _require_resampling(path, rate, sample_rate)
    SAMPLES.check(path, -(-samples.numel() * sample_rate // rate))
    if min(rate, sample_rate) < 1:
        raise ConfigError(
            Problem(
                "dataset.sample_rate",
                "is not a valid rate",
                sample_rate,
                "a whole number of Hz greater than 0",
            )
        )
    return resample(samples, rate, sample_rate), sample_rate


def audio_info(path: str | os.PathLike[str]) -> AudioInfo:
    """Read length, rate and channels from the header.

    A file that does not say its length is decoded once, to count.

    Raises:
        DataError: the file does not exist, or it is empty, cut short or no audio.
    """
    try:
        with open_audio(path) as file:
            return AudioInfo(file.length, file.samplerate, file.channels)
    except soundfile.LibsndfileError as error:
        samples, rate = _read_by_torchcodec(path, error)
        return AudioInfo(samples.shape[1], rate, samples.shape[0])


def match_audio(
    folder: Path, pattern: str, *, marks: Mapping[str, str] | None = None, expected: str = ""
) -> dict[str, re.Match[str]]:
    """The audio files below a folder whose names, relative to it, match
    `dataset.pattern` completely.

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
        raise ConfigError(
            Problem("dataset.pattern", f"is not a valid regular expression: {error}", pattern)
        ) from None
    for group, what in (marks or {}).items():
        if group not in compiled.groupindex:
            raise ConfigError(
                Problem(
                    "dataset.pattern",
                    f"does not mark the {what} in a file's name",
                    pattern,
                    f"a group (?P<{group}>...)",
                )
            )
    names = list_files(folder, SOUNDS).names
    matched = {name: found for name in names if (found := compiled.fullmatch(name))}
    if not matched:
        hint = (
            f"dataset.pattern has to match all of a name: there is {first_few(names, 2)}"
            if names
            else "set dataset.root=FOLDER"
        )
        raise DataError(
            Problem(str(folder), "the pattern matches no recording there", pattern, expected, hint)
        )
    return matched


def _require_resampling(path: str | os.PathLike[str], rate: int, wanted: int | None) -> None:
    """Check the filter's size, which grows with both rates in lowest terms."""
    if wanted is not None and wanted > 0 and rate > 0:
        common = math.gcd(rate, wanted)
        FILTER.check(path, (rate // common) * (wanted // common))


def _read_by_torchcodec(
    path: str | os.PathLike[str], refusal: soundfile.LibsndfileError
) -> tuple[Tensor, int]:
    """(float32[C, T], rate) of a file that soundfile refused.

    If torchcodec refuses it too, the error names the file.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb"):
            if not os.path.getsize(path):
                raise DataError(
                    Problem(
                        name,
                        "is empty",
                        expected=FORMATS,
                        hint="remove the file, or download it again",
                    )
                )
    except OSError as error:
        raise DataError(Problem(name, f"cannot be read: {error.strerror}")) from None
    # Imported only for what soundfile does not know: it needs FFmpeg's libraries, which many
    # machines do not have.
    try:
        if refusal.code != _UNKNOWN_FORMAT or names_other_files(path):
            raise ValueError
        from torchcodec.decoders import AudioDecoder  # pyright: ignore[reportMissingImports]

        decoder = AudioDecoder(name)
        rate, channels = decoder.metadata.sample_rate or 1, decoder.metadata.num_channels or 1
        SAMPLE_RATE.check(name, rate)
        SAMPLES.check(
            name, int((decoder.metadata.duration_seconds_from_header or 0) * rate * channels)
        )
        # Headers lie
        decoded = decoder.get_samples_played_in_range(0.0, (SAMPLES.most + 1) / (rate * channels))
        SAMPLES.check(name, decoded.data.numel())
        return decoded.data.to(torch.float32), int(decoded.sample_rate)
    except (ImportError, OSError, RuntimeError, ValueError):
        if other := another_kind(path, "recording"):
            raise DataError(
                Problem(name, f"is {other}, not a recording", expected=FORMATS)
            ) from None
        reason = (
            "is not audio, or in a format that cannot be read"
            if refusal.code == _UNKNOWN_FORMAT
            else f"is a damaged file: {refusal.error_string}"
        )
        other = (
            "torchcodec (pip install 'samewise[video]') with FFmpeg reads further formats, "
            "such as M4A; or convert the file"
        )
        hint = other if refusal.code == _UNKNOWN_FORMAT else "download the file again"
        raise DataError(Problem(name, reason, expected=FORMATS, hint=hint)) from None
