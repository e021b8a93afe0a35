"""Decodes image files to tensors: JPEG and PNG by torchvision, other formats and whatever it
refuses by Pillow.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torchvision.io  # registers the decoders
from PIL import ExifTags, Image, ImageFile
from torch import Tensor

from samewise.datasets.parts.file_kinds import another_kind
from samewise.datasets.parts.limits import PIXELS, read_bytes
from samewise.runner.errors import DataError, Problem

Mode = Literal["rgb", "gray"]

MODES: dict[Mode, tuple[int, str]] = {
    "rgb": (int(torchvision.io.ImageReadMode.RGB.value), "RGB"),
    "gray": (int(torchvision.io.ImageReadMode.GRAY.value), "L"),
}
"""What torchvision and Pillow call them."""

FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "PPM", "TIFF", "WEBP")
"""What Pillow may take a file for, whatever it is called; an EPS, for one, is a program, which
Pillow would have Ghostscript run."""

_TILE_WIDTH, _TILE_HEIGHT = 322, 323
"""Tags of a TIFF."""

_BITS, _SAMPLE_FORMAT, _SIGNED = 258, 339, 2
"""Tags of a TIFF: bits per sample, and what they mean; and one meaning."""

_SLACK = 1 << 16
"""Bytes that a small PNG may have beyond its pixels."""

DAMAGED = (
    ValueError,
    OSError,
    SyntaxError,
    EOFError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    struct.error,
)
"""What Pillow raises for files that are damaged."""

_PNG_HEADER = 33
"""Bytes of a PNG's signature and first chunk."""

_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Of a pixel of a PNG, by its type of colour."""

_GAMMA = (b"gAMA", b"sRGB", b"cHRM", b"iCCP", b"cICP", b"mDCV", b"cLLI")
"""Chunks of a PNG that say which colours its numbers mean."""

_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""Of an interlaced PNG: the first column and row, and the steps."""

_FRAME = re.compile(
    rb"\xff(?=[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf](..)[\x02-\x10](..)(..)(.))", re.DOTALL
)
"""The header of a JPEG's frame: its own length, precision, height, width, number of components."""


def read_image(path: str | os.PathLike[str], *, mode: Mode = "rgb") -> Tensor:
    """uint8[3, H, W] (or uint8[1, H, W] for "gray") of an image file, whatever it holds: grey,
    palette, transparency, CMYK, 16 bits.

    An EXIF orientation is applied to TIFF files alone, by Pillow: what torchvision's ImageFolder
    does. `upright` applies it to others.

    Raises: DataError: the file does not exist, or it is cut short, no image, or larger than what is
        decoded (`limits`); it names the file.
    """
    return decode_file(read_file(path), path, mode=mode)


def image_preparation(
    mode: str, *, size: Sequence[int] | None = None, channels: int = 0, upright: bool = False
) -> dict[str, Any]:
    """A data set's `preparation`: how a file becomes its image, for those who do it elsewhere."""
    resized = (
        {
            "size": list(size),
            "resizing": "to this height and width, whatever those of the file; bilinear, with "
            "antialiasing",
        }
        if size
        else {}
    )
    return {
        "colours": f"{channels} channels, as stored" if mode == "channels" else mode,
        "numbers": "[C, H, W], as stored" if mode == "channels" else "uint8[C, H, W], 0 to 255",
        "exif_orientation": "applied" if upright else "not applied, except in TIFF files",
        **resized,
    }


def orientation(path: str | os.PathLike[str]) -> int:
    """How EXIF says to turn an image file's pixels: 1 (as they are) to 8; 1 if it says nothing."""
    with Image.open(path) as image:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def read_file(path: str | os.PathLike[str]) -> bytes:
    """All bytes of an image file.

    Raises:
        DataError: it cannot be read, or is too large.
    """
    try:
        return read_bytes(path)
    except OSError as error:
        raise DataError(Problem(os.fspath(path), f"cannot be read: {error.strerror}")) from None


def decode_file(raw: bytes, path: str | os.PathLike[str], *, mode: Mode = "rgb") -> Tensor:
    """uint8[C, H, W] of a file's bytes.

    Raises:
        DataError: as `read_image` raises.
    """
    try:
        return decode(raw, mode=mode, name=os.fspath(path))
    except DataError:
        raise
    except (*DAMAGED, Image.DecompressionBombError) as error:
        expected = "an image: a JPEG, PNG, BMP, PPM, TIFF or WebP file"
        if other := another_kind(path, "image"):
            raise DataError(
                Problem(
                    os.fspath(path), f"is {other}, which is not read as an image", expected=expected
                )
            ) from None
        # Pillow's message repeats the address of a buffer: nothing to a person
        reason = (
            "is not an image, or is damaged"
            if isinstance(error, Image.UnidentifiedImageError)
            else f"is a damaged image: {error}"
        )
        raise DataError(
            Problem(
                os.fspath(path),
                reason if raw else "is empty",
                expected=expected,
                hint="remove the file, or download it again",
            )
        ) from None


def decode(raw: bytes, *, mode: Mode = "rgb", name: str = "image") -> Tensor:
    """uint8[C, H, W] of an encoded image; errors call it `name`.

    Raises: DataError: it has more pixels than are decoded. ValueError, OSError, SyntaxError:
        whatever Pillow raises for bytes that are not a complete image.
    """
    number, pillow = MODES[mode]
    # The operators themselves: the functions of torchvision.io warn at each call that they will go,
    # which takes longer than a small image.
    operator = _operator(raw)
    if operator is not None:
        PIXELS.check(name, pixels_of(raw))
        require_no_excess(raw)
        try:
            stored = unpack_png(raw if mode == "rgb" else without_gamma(raw))
            image = operator(torch.frombuffer(bytearray(stored), dtype=torch.uint8), number)
            if image.dtype == torch.uint8:
                return image
        except RuntimeError:
            pass  # not to its taste, or damaged: Pillow says which
    return _decode_by_pillow(raw, pillow, name)


def _operator(raw: bytes):
    """The decoder for the file's first bytes.

    Names may be wrong (ImageNet has a PNG named .JPEG).
    """
    name = (
        "decode_jpeg"
        if raw.startswith(b"\xff\xd8\xff")
        else "decode_png"
        if raw.startswith(b"\x89PNG\r\n\x1a\n") and raw[12:16] == b"IHDR"
        else ""
    )
    return getattr(torch.ops.image, name, None) if name else None


def pixels_of(raw: bytes) -> int:
    """The number of pixels of a JPEG or PNG: the largest of all parts that a decoder might take for
    its header.
    """
    if raw.startswith(b"\x89PNG"):
        return _product(raw[16:24], "!II")
    frames = (found.groups() for found in _FRAME.finditer(raw))
    return max(
        (
            _product(high + wide, "!HH")
            for length, high, wide, parts in frames
            if length == struct.pack("!H", 8 + 3 * parts[0])
        ),
        default=0,
    )


def require_no_excess(raw: bytes) -> None:
    """Raise a ValueError for a PNG with much more data than pixels: decoders unpack all of it,
    possibly a thousandfold, before they notice.
    """
    if not raw.startswith(b"\x89PNG"):
        return
    if len(raw) < _PNG_HEADER:
        raise ValueError("it is cut short")
    wide, high, bits, _ = struct.unpack("!IIBB", raw[16:26])
    packed, place = 0, 8
    while place + 8 <= len(raw):
        length, kind = struct.unpack("!I4s", raw[place : place + 8])
        packed += length if kind == b"IDAT" else 0
        place += 12 + length
    if packed > 2 * (wide * high * 4 * max(1, bits // 8) + high) + _SLACK:
        raise ValueError(f"{packed:,} bytes are more than {wide} x {high} pixels take")


def without_gamma(raw: bytes) -> bytes:
    """A PNG without what says how bright its numbers are meant.

    Other formats unchanged. libpng makes grey of light, not of numbers, where that is known.
    """
    if not raw.startswith(b"\x89PNG") or not any(kind in raw for kind in _GAMMA):
        return raw
    kept, place = [raw[:8]], 8
    while place + 12 <= len(raw):
        length, kind = struct.unpack("!I4s", raw[place : place + 8])
        if kind == b"IDAT":
            break
        kept.append(b"" if kind in _GAMMA else raw[place : place + 12 + length])
        place += 12 + length
    return b"".join((*kept, raw[place:]))


def unpack_png(raw: bytes) -> bytes:
    """A PNG with the same pixels uncompressed.

    Other formats unchanged. torchvision's decoder ends the process on damaged data, so zlib unpacks
    it.

    Raises:
        ValueError: they are damaged, or cut short.
    """
    if not raw.startswith(b"\x89PNG"):
        return raw
    wide, high, bits, colour, _, _, interlaced = struct.unpack("!IIBBBBB", raw[16:29])
    if colour not in _SAMPLES or bits not in (1, 2, 4, 8, 16) or interlaced > 1:
        raise ValueError("its header is not a valid PNG header")
    packed, first, place = list[bytes](), 0, 8
    while place + 12 <= len(raw):
        length, kind = struct.unpack("!I4s", raw[place : place + 8])
        if kind == b"IDAT":
            first = first or place
            if (
                zlib.crc32(raw[place + 4 : place + 8 + length]).to_bytes(4, "big")
                != raw[place + 8 + length : place + 12 + length]
            ):
                raise ValueError("its checksum does not match")
            packed.append(raw[place + 8 : place + 8 + length])
        elif packed:
            break
        place += 12 + length
    steps = _PASSES if interlaced else ((0, 0, 1, 1),)
    bits *= _SAMPLES[colour]
    sizes = [
        (-(-(high - top) // down), -(-(wide - left) // right))
        for left, top, right, down in steps
        if wide > left
    ]
    # A byte before each row says how it is filtered
    passes = [(rows, 1 + (columns * bits + 7) // 8) for rows, columns in sizes]
    most = sum(rows * length for rows, length in passes)
    try:
        pixels = zlib.decompressobj().decompress(b"".join(packed), most)
    except zlib.error as error:
        raise ValueError(f"its pixels cannot be unpacked: {error}") from None
    if len(pixels) < most or not most:
        raise ValueError("its pixels are cut short")
    at = 0
    for rows, length in passes:
        if rows and np.frombuffer(pixels, np.uint8, rows * length, at)[::length].max() > 4:
            raise ValueError("its pixels are damaged")
        at += rows * length
    stored = b"IDAT" + zlib.compress(pixels, 0)
    return b"".join(
        (
            raw[:first],
            struct.pack("!I", len(stored) - 4),
            stored,
            zlib.crc32(stored).to_bytes(4, "big"),
            b"\0\0\0\0IEND\xaeB`\x82",
        )
    )


def require_modest_tiles(image: Image.Image, name: str) -> None:
    """A TIFF tile or strip is decoded completely, however little of it is in the image."""
    if image.format == "TIFF":
        tags: Any = getattr(image, "tag_v2", {})
        PIXELS.check(name, int(tags.get(_TILE_WIDTH, 0)) * int(tags.get(_TILE_HEIGHT, 0)))


def _product(raw: bytes, form: str) -> int:
    high, wide = struct.unpack(form, raw) if len(raw) == struct.calcsize(form) else (0, 0)
    return high * wide


def open_image(raw: bytes, name: str) -> Image.Image:
    """Open an image with Pillow, in one of the supported formats.

    Raises:
        DataError: it has more pixels than are decoded.
        ValueError, OSError, SyntaxError, Image.DecompressionBombError: it is not an image.
    """
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "a file cut short is an error"
    # Pillow itself refuses more than twice as many
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, PIXELS.most)
    try:
        return Image.open(io.BytesIO(raw), formats=FORMATS)
    except Image.DecompressionBombError as error:
        PIXELS.check(name, int(next(iter(re.findall(r"\d+", str(error))), 0)))
        raise


def has_wide_integers(image: Image.Image) -> bool:
    """Whether pixels of mode I are those of a TIFF with more than 16 bits or with negative numbers.

    Of other files they have 16.
    """
    tags = getattr(image, "tag_v2", {})
    return image.mode.startswith("I") and (
        max(tags.get(_BITS, (16,))) > 16 or _SIGNED in tags.get(_SAMPLE_FORMAT, ())
    )


def loses_bits(image: Image.Image) -> bool:
    """Whether Pillow makes 8 bits of more: it does for TIFF and PPM with several samples a pixel.

    Not known any more once the pixels are loaded.
    """
    if image.mode.startswith(("I", "F")):
        return False
    # The largest value
    named = [
        tile.args[1]
        for tile in getattr(image, "tile", ())
        if image.format == "PPM" and isinstance(tile.args, tuple)
    ]
    return max((*getattr(image, "tag_v2", {}).get(_BITS, (8,)), 0)) > 8 or any(
        isinstance(most, int) and most > 255 for most in named
    )


def _decode_by_pillow(raw: bytes, mode: str, name: str) -> Tensor:
    with open_image(raw, name) as image:
        PIXELS.check(name, image.width * image.height)
        require_modest_tiles(image, name)
        if image.mode in ("F", "LAB", "HSV") or has_wide_integers(image):
            words = (
                f"has colours in {image.mode}"
                if image.mode in ("LAB", "HSV")
                else "has numbers of unknown range"
            )
            hint = (
                "convert it; or read its numbers as they are, with "
                "dataset=multichannel_folder, or dataset=class_folders dataset.mode=channels"
            )
            raise DataError(
                Problem(
                    name,
                    words,
                    f"mode {image.mode}",
                    "grey, RGB, CMYK or a palette, of 8 or 16 bits",
                    hint,
                )
            )
        if image.mode.startswith("I"):  # 16 bits a pixel: converting would clip at 255
            values = np.asarray(image).astype(np.int64).clip(0, 65535)
            image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
        pixels = np.array(image.convert(mode))
    return (
        torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None])
        .permute(2, 0, 1)
        .contiguous()
    )
