"""Decodes audio files to tensors.

soundfile reads WAV, FLAC, MP3 and OGG without system libraries; torchcodec reads other formats if
it works.
"""

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
from torch.utils.data import Dataset

from samewise.datasets.parts.file_kinds import another_kind, names_other_files
from samewise.datasets.parts.folders import SOUNDS, list_files
from samewise.datasets.parts.limits import FILTER, SAMPLE_RATE, SAMPLES
from samewise.datasets.parts.signals import resample, resampled_length
from samewise.datasets.parts.sound import FORMATS, UNKNOWN_FORMAT, decode_section, open_audio
from samewise.runner.errors import ConfigError, DataError, Problem, first_few

_LOUDEST = 16.0
"""Largest sample, 24 dB above full scale: larger ones are on the scale of whole numbers."""
_CANCELLED = 0.01
"""Share of the channels' loudness, -40 dB, below which their mean has lost the sound."""


@dataclass(frozen=True)
class AudioInfo:
    """Length, rate and channels in a file's header.

    Args:
        frames: Number of samples of one channel.
        sample_rate: Sample rate in Hz.
        channels: Number of channels.
    """

    frames: int
    sample_rate: int
    channels: int

    @property
    def seconds(self) -> float:
        return self.frames / self.sample_rate

    def frames_at(self, sample_rate: int) -> int:
        """Return the frames that `read_audio` returns for the whole file at another rate in Hz."""
        return (
            self.frames
            if sample_rate == self.sample_rate
            else resampled_length(self.frames, self.sample_rate, sample_rate)
        )


def audio_preparation(sample_rate: int, *, frames: int | None = None) -> dict[str, Any]:
    """Return how a recording becomes its waveform in evaluation: a data set's `preparation`.

    Args:
        sample_rate: The waveform's rate in Hz.
        frames: The samples that a recording is cut or padded to; None keeps its length.
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


class SoundSamples(Dataset[dict[str, Any]]):
    """Base of data sets of recordings at one sample rate, in Hz."""

    sample_rate: int

    @property
    def preparation(self) -> dict[str, Any]:
        """How a recording becomes a waveform, for programs that prepare recordings elsewhere."""
        return audio_preparation(self.sample_rate)


def read_audio(
    path: str | os.PathLike[str],
    *,
    sample_rate: int | None = None,
    mono: bool = True,
    start: int = 0,
    frames: int | None = None,
) -> tuple[Tensor, int]:
    """Decode a file, or a section of it, and resample it if its rate differs.

    A section's samples are those of the whole file, bit for bit, except in MP3, where rounding may
    differ.

    Args:
        path: The file.
        sample_rate: Rate in Hz to resample to, by a windowed sinc, which is deterministic; None
            keeps the file's rate.
        mono: Average the channels.
        start: The first frame, counted at the file's own rate.
        frames: Number of frames at the file's own rate; None reads to the end.

    Returns:
        The samples, float32[T] if mono, else float32[C, T], at full scale 1; and their rate in Hz.

    Raises:
        DataError: The file does not exist, is empty, cut short or not audio, has more sound than
            its header says, is shorter than the section, or exceeds a limit (`limits`); its samples
            are far above full scale; or its channels cancel each other. A file that does not say
            its length cannot be recognised as cut short: an MP3 without a Xing header, raw AAC, and
            what a program wrote into a pipe.
        ConfigError: `sample_rate` is not greater than 0.
    """
    try:
        with open_audio(path) as file:
            # Checked before decoding, which may take long
            _require_resampling(path, file.samplerate, sample_rate)
            samples, rate = decode_section(path, file, start, frames), file.samplerate
    except soundfile.LibsndfileError as error:
        samples, rate = _read_by_torchcodec(path, error)
        samples = samples[:, start : None if frames is None else start + frames]
    if not samples.shape[1] or (frames is not None and samples.shape[1] < frames):
        actual = f"{start + samples.shape[1]} frames" if samples.shape[1] else "no frames there"
        raise DataError(
            Problem(
                os.fspath(path),
                f"is too short: it has {actual}",
                expected=f"{frames} frames from frame {start} on"
                if frames is not None or start
                else "sound",
            )
        )
    # NaN is the largest
    if not (loudest := float(torch.stack(samples.aminmax()).abs().max())) <= _LOUDEST:
        reason, hint = (
            ("has samples far above full scale, 1", "divide them by 32768 if they have 16 bits")
            if math.isfinite(loudest)
            else ("contains values that are not finite numbers", "")
        )
        raise DataError(Problem(os.fspath(path), reason, loudest, hint=hint))
    if mono:
        samples, channels = samples.mean(0), samples
        if samples.norm() < _CANCELLED * channels.norm():
            raise DataError(
                Problem(
                    os.fspath(path),
                    "has channels in opposite phase, whose mean is silent",
                    hint="keep one: ffmpeg -i IN -af 'pan=mono|c0=c0' OUT.wav",
                )
            )
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
    """Read length, rate and channels from a file's header.

    A file that does not say its length is decoded once, to count its frames.

    Raises:
        DataError: The file does not exist, or is empty, cut short or not audio.
    """
    try:
        with open_audio(path) as file:
            return AudioInfo(file.length, file.samplerate, file.channels)
    except soundfile.LibsndfileError as error:
        samples, rate = _read_by_torchcodec(path, error)
        return AudioInfo(samples.shape[1], rate, samples.shape[0])


def match_audio(
    folder: Path, pattern: str, *, groups: Mapping[str, str] | None = None, expected: str = ""
) -> tuple[dict[str, re.Match[str]], str]:
    """Return the audio files whose names match `dataset.pattern` completely.

    Args:
        folder: The folder; files below it count too, by their names relative to it.
        pattern: A regular expression.
        groups: The groups that the pattern must have, by name, and what each marks, for messages.
        expected: An example of a matching name, for the message if no file matches.

    Returns:
        The matches by file name, and a description of the files that are not audio by their ending.

    Raises:
        ConfigError: The pattern is not a valid regular expression, or lacks a group.
        DataError: The folder does not exist, or no file matches.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            Problem("dataset.pattern", f"is not a valid regular expression: {error}", pattern)
        ) from None
    for group, meaning in (groups or {}).items():
        ConfigError.raise_if(
            group not in compiled.groupindex,
            "dataset.pattern",
            f"does not mark the {meaning} in a file's name",
            pattern,
            f"a group (?P<{group}>...)",
        )
    files = list_files(folder, SOUNDS)
    matched = {name: match for name in files.names if (match := compiled.fullmatch(name))}
    DataError.raise_if(
        not matched,
        str(folder),
        "the pattern matches no recording there",
        pattern,
        expected,
        f"dataset.pattern has to match all of a name: there is {first_few(files.names, 2)}"
        if files.names
        else f"there is only {files.left_out}"
        if files.left_out
        else "the folder is empty",
    )
    return matched, files.left_out


def _require_resampling(path: str | os.PathLike[str], rate: int, new_rate: int | None) -> None:
    """Check the size of the resampling filter."""
    if new_rate is not None and new_rate > 0 and rate > 0:
        # The filter grows with the product of the two rates in lowest terms.
        common = math.gcd(rate, new_rate)
        FILTER.check(path, (rate // common) * (new_rate // common))


def _read_by_torchcodec(
    path: str | os.PathLike[str], refusal: soundfile.LibsndfileError
) -> tuple[Tensor, int]:
    """Return (float32[C, T], rate) of a file that soundfile refused.

    Raises:
        DataError: torchcodec refuses the file too.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb"):
            DataError.raise_if(
                not os.path.getsize(path),
                name,
                "is empty",
                expected=FORMATS,
                hint="remove the file, or download it again",
            )
    except OSError as error:
        raise DataError(Problem(name, f"cannot be read: {error.strerror}")) from None
    # torchcodec is imported only for formats that soundfile does not know: it needs FFmpeg's
    # libraries, which many machines do not have.
    try:
        if refusal.code != UNKNOWN_FORMAT or names_other_files(path):
            raise ValueError
        from torchcodec.decoders import AudioDecoder  # pyright: ignore[reportMissingImports]

        decoder = AudioDecoder(name)
        rate, channels = decoder.metadata.sample_rate or 1, decoder.metadata.num_channels or 1
        SAMPLE_RATE.check(name, rate)
        SAMPLES.check(
            name, int((decoder.metadata.duration_seconds_from_header or 0) * rate * channels)
        )
        # A header may understate the length: one sample more than the limit is enough to tell
        decoded = decoder.get_samples_played_in_range(0.0, (SAMPLES.most + 1) / (rate * channels))
        SAMPLES.check(name, decoded.data.numel())
        return decoded.data.to(torch.float32), int(decoded.sample_rate)
    except (ImportError, OSError, RuntimeError, ValueError):
        if description := another_kind(path, "recording"):
            raise DataError(
                Problem(name, f"is {description}, not a recording", expected=FORMATS)
            ) from None
        description = (
            "torchcodec (pip install '.[video]' in samewise's folder) with FFmpeg reads further "
            "formats, such as M4A; or convert the file"
        )
        raise DataError(
            Problem(
                name,
                "is not audio, or in a format that cannot be read"
                if refusal.code == UNKNOWN_FORMAT
                else f"is damaged or cut short (libsndfile: {refusal.error_string.rstrip('.')})",
                expected=FORMATS,
                hint=description if refusal.code == UNKNOWN_FORMAT else "download the file again",
            )
        ) from None
