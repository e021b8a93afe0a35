"""Opens recordings by soundfile and decodes sections of them.

A file that is cut short, which libsndfile would read without an error, is refused.
"""

from __future__ import annotations

import os
import struct
from functools import lru_cache
from typing import BinaryIO

import soundfile
import torch
from torch import Tensor

from samewise.datasets.parts.limits import SAMPLE_RATE, SAMPLES, require_regular
from samewise.runner.errors import DataError, Problem

FORMATS = "a recording: a WAV, FLAC, MP3 or OGG file"
# Sizes that programs leave in a header when they write into a pipe; the second is SoX's
_SIZE_UNKNOWN = (
    0,
    0x7FFFF000,
    0xFFFFFFFF,
)

# FLAC that was written into a pipe does not say its length
_LENGTH_UNKNOWN = 1 << 62
"""Frames from which on libsndfile means that the header does not say the length."""

_ENDLESS = 1 << 50
"""Bytes beyond the end of any file."""

# An MP3's frame uses bits of frames before it. libsndfile misjudges where the last page of an Ogg
# Vorbis file begins, if it seeks into it: a page ends at most 255 packets, of at most 4096 samples.
# An Opus frame depends on all frames before it; in GSM 6.10 and several ADPCMs libsndfile cannot
# seek.
_RUN_UP = {"MPEG_LAYER_III": 32 * 1152, "VORBIS": 255 * 4096} | dict.fromkeys(
    (
        "PCM_S8",
        "PCM_U8",
        "PCM_16",
        "PCM_24",
        "PCM_32",
        "FLOAT",
        "DOUBLE",
        "ULAW",
        "ALAW",
        "IMA_ADPCM",
        "MS_ADPCM",
    ),
    0,
)
"""Samples to decode before a section; other encodings are decoded from their beginning."""

_CHUNKS = {"WAV": ("<4sI", b"data"), "WAVEX": ("<4sI", b"data"), "AIFF": (">4sI", b"SSND")}
"""Packing of a chunk's header, and the name of the chunk with the sound."""

_OGG_PAGE, _OGG_LAST = 65_307, 4
"""Most bytes of an Ogg page, and the flag of a stream's last page."""

_BLOCK = 1 << 16


class Sound(soundfile.SoundFile):
    """Open file whose `length`, in frames, is right even if `frames` is an estimate or unknown."""

    length: int

    def seekable(self) -> bool:
        """Return False, so that soundfile does not seek after each block."""
        # An MP3 that continues after a seek lacks the bits of earlier frames
        return False

    def close(self) -> None:
        """Close the file, and the object that it was opened with."""
        super().close()
        if isinstance(self.name, _Longer):
            self.name.close()


class _Longer:
    """File that claims more bytes than it has.

    libsndfile then also reads the frames beyond an estimate from the file's size.
    """

    def __init__(self, path: str | os.PathLike[str], more: int) -> None:
        self._file, self._more, self._beyond = open(path, "rb"), more, 0  # noqa: SIM115 (closed with the object)
        self.read, self.readinto, self.close = (
            self._file.read,
            self._file.readinto,
            self._file.close,
        )

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        self._beyond = self._more if whence == os.SEEK_END else 0
        return self.tell()

    def tell(self) -> int:
        return self._file.tell() + self._beyond


def open_audio(path: str | os.PathLike[str]) -> Sound:
    """Open a regular, complete file with a supported rate."""
    _require_file(path)
    file = Sound(path)
    try:
        _require_whole(path, file.format)
        if file.format != "MP3" and file.subtype == "MPEG_LAYER_III":
            reason, hint = (
                "is MP3 within another format, whose length is unknown",
                "convert it: ffmpeg -i IN OUT.wav",
            )
            raise DataError(Problem(os.fspath(path), reason, expected=FORMATS, hint=hint))
        SAMPLE_RATE.check(path, file.samplerate)
        file.length = file.frames
        if file.frames >= _LENGTH_UNKNOWN or (
            file.format == "MP3" and _is_estimated(path, file.frames)
        ):
            status, is_mp3 = os.stat(path), file.format == "MP3"
            file.close()
            file = _open_unknown(path, is_mp3=is_mp3)
            file.length = _count(os.fspath(path), status.st_size, status.st_mtime_ns, is_mp3=is_mp3)
    except BaseException:
        file.close()
        raise
    return file


def _is_estimated(path: str | os.PathLike[str], frames: int) -> bool:
    """Whether the length of an MP3 is estimated from the file's size: it has no Xing header."""
    with Sound(_Longer(path, max(8, os.path.getsize(path) // 200))) as file:
        return file.frames != frames


def _open_unknown(path: str | os.PathLike[str], *, is_mp3: bool) -> Sound:
    """Open a file that can be read to its end, wherever the end is."""
    return Sound(_Longer(path, _ENDLESS) if is_mp3 else path)


@lru_cache(maxsize=1 << 16)
def _count(path: str, size: int, changed: int, *, is_mp3: bool) -> int:
    """Count the frames of a file that does not say its length; a changed file is counted again."""
    with _open_unknown(path, is_mp3=is_mp3) as file:
        return sum(iter(lambda: len(file.read(_BLOCK, dtype="float32", always_2d=True)), 0))


def _require_file(path: str | os.PathLike[str]) -> None:
    try:
        require_regular(path, into_memory=False)
    except OSError as error:
        raise DataError(Problem(os.fspath(path), f"cannot be read: {error.strerror}")) from None


def decode_section(
    path: str | os.PathLike[str], file: Sound, start: int, frames: int | None
) -> Tensor:
    """Decode float32[C, T] of an open file, T at most `frames`."""
    if not 0 <= start <= file.length:
        raise DataError(
            Problem(
                os.fspath(path),
                f"is too short: it has {file.length} frames",
                expected=f"more than {start} frames",
            )
        )
    length = file.length - start if frames is None else min(frames, file.length - start)
    SAMPLES.check(path, length * file.channels)
    # The run-up is decoded and dropped in blocks, which bounds the memory
    before = min(start, _RUN_UP.get(file.subtype, start))
    if start > before:
        file.seek(start - before)
    while before and (
        skipped := len(file.read(min(before, _BLOCK), dtype="float32", always_2d=True))
    ):
        before -= skipped
    samples = torch.from_numpy(file.read(length, dtype="float32", always_2d=True)).t().contiguous()
    if samples.shape[1] < length:
        raise _cut_short(
            path, f"{start + samples.shape[1]} of the {file.length} frames that its header promises"
        )
    return samples


def _cut_short(path: str | os.PathLike[str], detail: str, hint: str = "") -> DataError:
    return DataError(
        Problem(
            os.fspath(path),
            f"is cut short: {detail}",
            hint="; ".join(filter(None, ("remove the file, or download it again", hint))),
        )
    )


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
                raise _cut_short(
                    path,
                    "it lacks the last page of an Ogg file",
                    "if this is all there is, write its end: ffmpeg -i IN -c copy OUT.ogg",
                )
            return
    if length not in _SIZE_UNKNOWN and begin + length > size:
        raise _cut_short(
            path, f"{max(0, size - begin)} of the {length} bytes of sound that its header promises"
        )


def _find_sound(file: BinaryIO, size: int, packing: str, chunk: bytes) -> tuple[int, int]:
    """Return a chunked file's sound: its first byte and its length; (0, 0) if it has none."""
    place = 12
    while place + 8 <= size:
        file.seek(place)
        name, length = struct.unpack(packing, file.read(8))
        place += 8
        if name == chunk:
            return place, length
        place += length + length % 2
    return 0, 0


def _ends_ogg(file: BinaryIO, size: int) -> bool:
    """Whether the last page of an Ogg file is complete and the last of its stream."""
    file.seek(max(0, size - 2 * _OGG_PAGE))
    tail = file.read()
    place = tail.rfind(b"OggS\0")
    if place < 0 or place + 27 > len(tail) or not tail[place + 5] & _OGG_LAST:
        return False
    sizes = tail[place + 27 : place + 27 + tail[place + 26]]
    return len(tail) >= place + 27 + tail[place + 26] + sum(sizes)
