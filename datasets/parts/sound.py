"""Opens recordings by soundfile and decodes sections of them.

A file that is cut short, or has more sound than its header says, is refused: libsndfile would read
it without an error.
"""

import os
import re
import struct
from functools import lru_cache
from typing import BinaryIO

import soundfile
import torch
from torch import Tensor

from samewise.datasets.parts.limits import SAMPLE_RATE, SAMPLES, require_regular
from samewise.runner.errors import DataError, Problem

UNKNOWN_FORMAT = 1  # SF_ERR_UNRECOGNISED_FORMAT of libsndfile
FORMATS = "a recording: a WAV, FLAC, MP3 or OGG file"
# The first is SoX's
_SIZE_UNKNOWN = (0x7FFFF000, 0xFFFFFFFF)
"""Sizes that programs leave in a header when they write into a pipe."""

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

_CHUNKS = {
    b"RIFF": ("<4sI", b"data"),
    b"RF64": ("<4sI", b"data"),
    b"FORM": (">4sI", b"SSND"),
}
"""Packing of a chunk's header, and the name of the chunk with the sound, by a file's first bytes.
"""

_XING = re.compile(
    rb"\xff[\xe2-\xfb]...{9,34}?(?:Xing|Info)\0\0\0[\x03\x07\x0b\x0f].{4}(.{4})", re.DOTALL
)
"""First frame of an MP3 whose encoder has written its number of frames and of bytes."""

_MORE_SOUND = re.compile(
    rb"\0*+(?!TAG)(?=.{4})(?:RIFF|FORM|data|\.snd|[ -~]{0,3}[^ -~])", re.DOTALL
)
"""Bytes after the sound that are not the name of another chunk, nor a tag."""

_OGG_PAGE, _OGG_FIRST, _OGG_LAST = 65_307, b"OggS\0\2" + bytes(8), 4
"""Most bytes of an Ogg page, how a stream's first page begins, and the flag of its last."""

_FIRST_PAGES, _HEADERS, _REST = 512, 1 << 12, 1 << 20
"""Bytes with the first pages of all streams, with all headers, and after the sound, to look at."""

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
    try:
        require_regular(path, into_memory=False)
        # libmpg123 writes to standard error what it notices in a file that is cut short
        is_length_known = _require_whole(path)
    except OSError as error:
        raise DataError(Problem(os.fspath(path), f"cannot be read: {error.strerror}")) from None
    file = Sound(path)
    try:
        # libsndfile takes any file that ends in .au for sound without a header
        if file.format == "RAW":
            raise soundfile.LibsndfileError(UNKNOWN_FORMAT)
        is_mp3 = file.format == "MP3"
        if not is_mp3 and file.subtype == "MPEG_LAYER_III":
            raise DataError(
                Problem(
                    os.fspath(path),
                    "is MP3 within another format, whose length is unknown",
                    expected=FORMATS,
                    hint="convert it: ffmpeg -i IN OUT.wav",
                )
            )
        SAMPLE_RATE.check(path, file.samplerate)
        file.length = file.frames
        # libsndfile estimates an MP3's length from the file's size
        if file.frames >= _LENGTH_UNKNOWN or (is_mp3 and not is_length_known):
            status = os.stat(path)
            file.close()
            file = _open_unknown(path, is_mp3=is_mp3)
            file.length = _count(os.fspath(path), status.st_size, status.st_mtime_ns, is_mp3=is_mp3)
    except BaseException:
        file.close()
        raise
    return file


def _open_unknown(path: str | os.PathLike[str], *, is_mp3: bool) -> Sound:
    """Open a file that can be read to its end, wherever the end is."""
    return Sound(_Longer(path, _ENDLESS) if is_mp3 else path)


@lru_cache(maxsize=1 << 16)
def _count(path: str, size: int, changed: int, *, is_mp3: bool) -> int:
    """Count the frames of a file that does not say its length; a changed file is counted again."""
    with _open_unknown(path, is_mp3=is_mp3) as file:
        return sum(iter(lambda: len(file.read(_BLOCK, dtype="float32", always_2d=True)), 0))


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


def _require_whole(path: str | os.PathLike[str]) -> bool:
    """Refuse a file with less or more sound than its header says: libsndfile raises no error.

    Returns:
        Whether the header says it.
    """
    with open(path, "rb") as file:
        size, beginning = os.fstat(file.fileno()).st_size, file.read(_HEADERS)
        if beginning.startswith(b"OggS"):
            _require_one_stream(path, file, size, beginning)
        if (sound := _find_sound(file, size, beginning)) is None:
            return False
        begin, length = sound
        if begin + length > size:
            raise _cut_short(
                path,
                f"{max(0, size - begin)} of the {length} bytes of sound that its header promises",
            )
        file.seek(begin + length)
        rest = file.read(_REST)
    if _MORE_SOUND.match(rest):
        raise DataError(
            Problem(
                os.fspath(path),
                f"has more sound than its header says: {size - begin - length} bytes follow the "
                f"{length} bytes of sound",
                hint="if they are sound: ffmpeg -ignore_length 1 -i IN OUT.wav; if not: ffmpeg "
                "-i IN OUT.wav"
                if beginning.startswith(b"RIFF")
                else "download it again, or split it where the next recording begins",
            )
        )
    return True


def _find_sound(file: BinaryIO, size: int, beginning: bytes) -> tuple[int, int] | None:
    """Return the first byte of a file's sound, and its length; None if the header does not say."""
    form = beginning[:4]
    if form in (b".snd", b"dns.") and size >= 12:
        begin, length = struct.unpack_from(">II" if form == b".snd" else "<II", beginning, 4)
        return None if length in _SIZE_UNKNOWN else (begin, length)
    if form not in _CHUNKS:
        return None if form in (b"fLaC", b"OggS") else _find_mp3(file, size, beginning)
    (packing, chunk), place = _CHUNKS[form], 12
    while place + 8 <= size:
        file.seek(place)
        name, length = struct.unpack(packing, file.read(8))
        place += 8
        if name == chunk:
            if form == b"RF64" and length == _SIZE_UNKNOWN[1]:
                length = int.from_bytes(beginning[28:36], "little")
            return None if length in _SIZE_UNKNOWN else (place, length)
        place += length + length % 2
    return None


def _find_mp3(file: BinaryIO, size: int, beginning: bytes) -> tuple[int, int] | None:
    begin = 0
    if beginning.startswith(b"ID3"):
        # Seven bits of each byte count
        begin = 10 + sum(byte << 7 * place for place, byte in enumerate(beginning[9:5:-1]))
        file.seek(begin)
        beginning = file.read(_HEADERS)
    if not (frame := _XING.search(beginning)):
        return None
    begin, length = begin + frame.start(), int.from_bytes(frame[1], "big")
    # Some encoders leave out the first frame, or count a tag
    return begin, size - begin if abs(size - begin - length) <= length // 100 else length


def _require_one_stream(
    path: str | os.PathLike[str], file: BinaryIO, size: int, beginning: bytes
) -> None:
    """Refuse an Ogg file that does not end in the whole last page of its first stream."""
    file.seek(max(0, size - 2 * _OGG_PAGE))
    tail = file.read()
    page = tail[tail.rfind(b"OggS\0") :]
    if (
        len(page) < 27
        or not page[5] & _OGG_LAST
        or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])
    ):
        raise _cut_short(
            path,
            "it lacks the last page of an Ogg file",
            "if this is all there is, write its end: ffmpeg -i IN -c copy OUT.ogg",
        )
    if _OGG_FIRST + page[14:18] not in beginning[:_FIRST_PAGES]:
        raise DataError(
            Problem(
                os.fspath(path),
                "is several Ogg files in sequence, of which only the first would be read",
                hint="write them as one: ffmpeg -i IN OUT.wav",
            )
        )
