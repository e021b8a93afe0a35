"""Audio files, or sections of them, by number.

Names are packed; waveforms are decoded on demand, or all kept in memory.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from mmap import mmap
from pathlib import Path
from typing import Any, Literal, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from samewise.datasets.parts.audio_files import AudioInfo, audio_info, read_audio
from samewise.datasets.parts.contents import add_files, spaced_indices
from samewise.datasets.parts.decode import read_file
from samewise.runner.errors import DataError, Problem

Cache = Literal["none", "memory"]

_ROUNDED = 0.01
"""Seconds by which a listed section may end after its file, as lists round times."""
_HEADERS = 2_000
"""Number of files whose headers are read before training: it takes tenths of a second."""

_SILENT, _NAMED = mmap(-1, 4096), 10
"""Marks of recordings of which workers have warned, by their names' hashes, and their most."""


class Texts:
    """Many strings in one block of bytes.

    A worker that reads a list of a million strings would copy the list through its reference
    counts.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        coded = [text.encode("utf-8", "surrogateescape") for text in texts]
        self.block = np.frombuffer(b"".join(coded), dtype=np.uint8)
        self.ends = np.cumsum([0, *map(len, coded)])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:
        start, stop = self.ends[index], self.ends[index + 1]
        return self.block[start:stop].tobytes().decode("utf-8", "surrogateescape")


@final
class Recordings:
    """Mono waveforms at one rate.

    Args:
        folder: The folder that the names are relative to.
        names: File names, with "/" between folders.
        sample_rate: The waveforms' rate in Hz; files at another rate are resampled.
        cache: "memory" decodes all files at the start and keeps them in one tensor, which worker
            processes share.
        sections: (start, length) in seconds of each recording in its file; None: all are whole
            files.
        whole_within: A section that starts at 0 is the whole file if its listed length is 0, or
            differs from the file's by at most this many seconds; None: no section is.

    Raises:
        DataError: There are no files; one of up to 2,000, evenly spaced, is not audio by its
            header; or, with cache="memory", a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        *,
        sample_rate: int,
        cache: Cache = "none",
        sections: Sequence[tuple[float, float]] | None = None,
        whole_within: float | None = None,
    ) -> None:
        DataError.raise_if(not names, str(folder), "no recordings were found for this split")
        self.folder = folder
        self.sample_rate = sample_rate
        self.names = Texts(names)
        self._sections = None if sections is None else np.array(sections, dtype=np.float64)
        self._whole_within = whole_within
        self._cached: Tensor | None = None
        self._has_sections = sections is not None and whole_within is None
        # With a cache, decoding reads every file anyway
        if cache == "none" or whole_within is not None:
            for index in spaced_indices(len(names), _HEADERS):
                info = audio_info(self.path(index))
                self._frames(index, info)
                self._has_sections = self._has_sections or self._section(index, info) != (
                    0,
                    info.frames,
                )
        if cache == "memory":
            waveforms = [self._decode(index) for index in range(len(names))]
            self._cached = torch.cat(waveforms)
            self._ends = np.cumsum([0, *map(len, waveforms)])

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> Path:
        """Return the file of a recording."""
        return self.folder / self.names[index]

    def fields(self, index: int, **further: Any) -> tuple[str, dict[str, Any]]:
        """Return a recording's key, and its fields as a shard has them, with further ones.

        Raises:
            DataError: Recordings are sections of files, which cannot be copied as they are.
        """
        DataError.raise_if(
            self._has_sections,
            str(self.path(index)),
            "recordings are sections of files, which cannot be copied as they are encoded",
        )
        return self.names[index], {"audio": read_file(self.path(index)), **further}

    def frames(self, index: int) -> int:
        """Return the recording's length in samples at `sample_rate`, at least 1."""
        if self._cached is not None:
            return int(self._ends[index + 1] - self._ends[index])
        return self._frames(index, audio_info(self.path(index)))

    def stretch(self, index: int, start: int = 0, frames: int | None = None) -> Tensor:
        """Return float32[frames] of a recording from `start`, at `sample_rate`.

        Without `frames`, the stretch goes to the recording's end. A silent recording is warned of.
        """
        stretch = self._stretch(index, start, frames)
        # Of a silent stretch, the rest may be sound
        if not stretch.any() and not self._stretch(index, 0, None).any():
            warn_of_silence(str(self.path(index)))
        return stretch

    def _stretch(self, index: int, start: int, frames: int | None) -> Tensor:
        stop = None if frames is None else start + frames
        if self._cached is not None:
            return self._cached[self._ends[index] : self._ends[index + 1]][start:stop]
        if self._sections is None and audio_info(self.path(index)).sample_rate == self.sample_rate:
            return read_audio(self.path(index), start=start, frames=frames)[0]
        # Resampled alone, a stretch would have other samples at its ends than the whole recording
        return self._decode(index)[start:stop]

    def fingerprint(self) -> str:
        """Return 32 hex digits that identify the recordings.

        They cover names, rate, sections (unless all are whole files), the sizes of up to 100,000
        files, evenly spaced, and the bytes of 64.
        """
        digest = blake2b(repr((len(self), self.sample_rate)).encode(), digest_size=16)
        if self._sections is not None and self._has_sections:
            digest.update(self._sections)
        digest.update(self.names.block)
        digest.update(self.names.ends)
        add_files(digest, self.path, len(self))
        return digest.hexdigest()

    def _frames(self, index: int, info: AudioInfo) -> int:
        _, length = self._section(index, info)
        frames = replace(info, frames=length).frames_at(self.sample_rate)
        if not frames:
            raise DataError(Problem(str(self.path(index)), "contains no sound"))
        return frames

    def _decode(self, index: int) -> Tensor:
        if self._sections is None:
            return read_audio(self.path(index), sample_rate=self.sample_rate)[0]
        begin, length = self._section(index, audio_info(self.path(index)))
        return read_audio(
            self.path(index), sample_rate=self.sample_rate, start=begin, frames=length
        )[0]

    def _section(self, index: int, info: AudioInfo) -> tuple[int, int]:
        """Return the first frame in the file and the number of frames, at the file's rate."""
        if self._sections is None:
            return 0, info.frames
        begin_seconds, seconds = self._sections[index].tolist()
        within = _ROUNDED if self._whole_within is None else self._whole_within
        if begin_seconds + seconds > info.seconds + within:
            is_far = begin_seconds + seconds > 100 * info.seconds
            raise DataError(
                Problem(
                    str(self.path(index)),
                    "is too short for its list",
                    f"{info.seconds:.3f} s",
                    f"at least {begin_seconds + seconds:.3f} s, the end of a listed section",
                    "a list has seconds, not milliseconds" if is_far else "",
                )
            )
        if (
            self._whole_within is not None
            and not begin_seconds
            and (not seconds or seconds >= info.seconds - within)
        ):
            return 0, info.frames
        begin, length = round(begin_seconds * info.sample_rate), round(seconds * info.sample_rate)
        return begin, min(length, info.frames - begin)


def warn_of_silence(name: str) -> None:
    """Warn of a silent recording, which may be meant: once in a run, and of the first few."""
    place = crc32(name.encode("utf-8", "surrogateescape")) % len(_SILENT)
    if not _SILENT[place] and sum(_SILENT[:]) < _NAMED:
        _SILENT[place] = True
        reason, hint = "is silent: all its samples are 0", "leave it out, unless it is meant"
        print(f"warning: {Problem(name, reason, hint=hint)}", file=sys.stderr)


def crop_or_pad(waveform: Tensor, frames: int) -> Tensor:
    """Return float32[frames]: a longer waveform's middle, or a shorter one followed by silence."""
    start = max(0, len(waveform) - frames) // 2
    middle = waveform[start : start + frames]
    return torch.nn.functional.pad(middle, (0, frames - len(middle)))
