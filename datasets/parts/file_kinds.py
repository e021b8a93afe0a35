"""Recognises files by their first bytes, for messages about a file of the wrong kind."""

import io
import os
import re
from typing import Final

_LONGEST: Final = 262

_BEGINNINGS: Final = (
    (0, b"\xff\xd8\xff", "image", "a JPEG image"),
    (0, b"\x89PNG\r\n", "image", "a PNG image"),
    (0, b"GIF8", "image", "a GIF image"),
    (0, b"BM", "image", "a BMP image"),
    (0, b"II*\0", "image", "a TIFF image"),
    (0, b"MM\0*", "image", "a TIFF image"),
    (8, b"WEBP", "image", "a WebP image"),
    (8, b"WAVE", "recording", "a WAV recording"),
    (0, b"fLaC", "recording", "a FLAC recording"),
    (0, b"OggS", "recording", "an Ogg recording"),
    (0, b"ID3", "recording", "an MP3 recording"),
    *(
        (0, bytes((0xFF, second)), "recording", "an MP3 recording")
        for second in (0xE2, 0xE3, 0xF2, 0xF3, 0xFA, 0xFB)
    ),  # a frame of layer III
    (0, b".snd", "recording", "an AU recording"),
    (8, b"AIFF", "recording", "an AIFF recording"),
    # These containers name their brand after "ftyp"; those of other brands are videos
    (4, b"ftypM4A", "recording", "an M4A recording"),
    *(
        (4, b"ftyp" + brand, "photograph", "a HEIC or AVIF photograph")
        for brand in (b"hei", b"hev", b"mif1", b"msf1", b"avi")
    ),
    (4, b"ftyp", "video", "an MP4 video"),
    (8, b"AVI ", "video", "an AVI video"),
    (0, b"\x1aE\xdf\xa3", "video", "a Matroska or WebM video"),
    *(
        (0, start, "list", "a list of other files")
        for start in (b"#EXTM3U", b"ffconcat", b"<?xml", b"<MPD")
    ),
    (0, b"%PDF", "document", "a PDF document"),
    (0, b"PK\x03\x04", "archive", "a ZIP archive, or what torch.save writes"),
    (0, b"\x1f\x8b", "archive", "a gzip archive"),
    (0, b"PAR1", "table", "a Parquet table"),
    (257, b"ustar", "archive", "a tar archive"),
    (0, b"version https://git-lfs", "pointer", "a Git LFS pointer (`git lfs pull` gets the file)"),
    *((0, start, "page", "an HTML page") for start in (b"<!DOCTYPE html", b"<html")),
)
"""(offset, bytes there, kind, description); the first match counts."""
_TEXT: Final = re.compile(rb"(?:[\t\n\r -~]|[\xc2-\xf4][\x80-\xbf]+)+[\xc2-\xf4]?")
"""The beginning of any other text in UTF-8."""


def another_kind(file: str | os.PathLike[str] | bytes, expected: str) -> str | None:
    """Describe a file that is certainly not of the expected kind.

    Args:
        file: The file, or its first bytes.
        expected: "image", "recording" or "video".

    Returns:
        The description; None if the kind is the expected one, or unknown.
    """
    kind = _kind(file)
    return kind[1] if kind and kind[0] != expected else None


def names_other_files(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a playlist through which FFmpeg would open other files."""
    kind = _kind(path)
    return kind is not None and kind[0] == "list"


def _kind(file: str | os.PathLike[str] | bytes) -> tuple[str, str] | None:
    """Return a file's kind and its description; None if unknown."""
    try:
        with io.BytesIO(file) if isinstance(file, bytes) else open(file, "rb") as handle:
            # A text may begin with UTF-8's byte order mark
            beginning = handle.read(_LONGEST).removeprefix(b"\xef\xbb\xbf")
    except OSError:
        return None
    return next(
        (
            (kind, description)
            for offset, start, kind, description in _BEGINNINGS
            if beginning[offset : offset + len(start)] == start
        ),
        ("text", "a text file") if _TEXT.fullmatch(beginning) else None,
    )
