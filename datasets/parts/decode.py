"""Decodes image files to tensors.

torchvision decodes JPEG and PNG; Pillow decodes other formats, and what torchvision refuses.
"""

import io
import os
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torchvision.io  # registers the decoders
from PIL import Image, ImageFile
from torch import Tensor

from samewise.datasets.parts.file_kinds import another_kind
from samewise.datasets.parts.limits import PIXELS, read_bytes
from samewise.runner.errors import DataError, Problem, first_line

Mode = Literal["rgb", "gray"]

MODES: dict[Mode, tuple[int, str]] = {
    "rgb": (int(torchvision.io.ImageReadMode.RGB.value), "RGB"),
    "gray": (int(torchvision.io.ImageReadMode.GRAY.value), "L"),
}
"""Names of the modes in torchvision and Pillow."""

FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "PPM", "TIFF", "WEBP")
"""Formats that Pillow may recognise, whatever a file's name says.

EPS, for example, is left out: it is a program, which Pillow would have Ghostscript run.
"""

_TILE_WIDTH, _TILE_HEIGHT = 322, 323
"""TIFF tags of a tile's size."""

_BITS, _SAMPLE_FORMAT, _SIGNED = 258, 339, 2
"""TIFF tags for bits per sample and sample format, and the format of signed integers."""

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
"""Exceptions that Pillow raises for damaged files."""

_PNG_HEADER = 33
"""Bytes of a PNG's signature and first chunk."""

_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Samples per pixel of a PNG, by its colour type."""

_GAMMA = (b"gAMA", b"sRGB", b"cHRM", b"iCCP", b"cICP", b"mDCV", b"cLLI")
"""PNG chunks that say which colours its numbers mean."""

_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""Passes of an interlaced PNG: first column, first row, column step, row step."""

_FRAME = re.compile(
    rb"\xff(?=[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf](..)[\x02-\x10](..)(..)(.))", re.DOTALL
)
"""Header of a JPEG's frame: its length, precision, height, width and number of components."""

_PROGRESSIVE = re.compile(rb"\xff\xc2\0.\x08....(.)", re.DOTALL)
"""Header of a progressive JPEG's frame: its number of components."""

_LAST_BITS = re.compile(
    rb"\xff\xda\0\x08\x01(.).[\x01-?]\?[\0\x10\x20\x30\x40\x50\x60\x70\x80\x90\xa0\xb0\xc0\xd0]",
    re.DOTALL,
)
"""Header of a progressive JPEG's scan with the last bits of a component's finest details."""

_GREY, _FURTHER = (128, 64, 127), b"\x5a\xa5" * 32
"""What libjpeg makes missing pixels, also of CMYK, and bytes that can stand for some."""


def read_image(path: str | os.PathLike[str], *, mode: Mode = "rgb") -> Tensor:
    """Decode an image file, whatever it contains: grey, palette, transparency, CMYK, 16 bits.

    Like torchvision's ImageFolder, it applies an EXIF orientation to TIFF files alone (Pillow
    does). `upright` applies it to other formats.

    Args:
        path: The file.
        mode: "rgb" or "gray".

    Returns:
        uint8[3, H, W], or uint8[1, H, W] for "gray".

    Raises:
        DataError: The file does not exist, is cut short, is not an image, or exceeds a limit
            (`limits`).
    """
    return decode_file(read_file(path), path, mode=mode)


def image_preparation(
    mode: str, *, size: Sequence[int] | None = None, channels: int = 0, upright: bool = False
) -> dict[str, Any]:
    """Return how a file becomes its image: a data set's `preparation`."""
    resized = (
        {
            "size": list(size),
            "resizing": "to this height and width, whatever those of the file; bilinear, with "
            "antialiasing",
        }
        if size
        else {}
    )
    if mode == "tensors":
        return {"numbers": "of any shape, as stored; floating point as float32"}
    return {
        "colours": f"{channels} channels, as stored" if mode == "channels" else mode,
        "numbers": "[C, H, W], as stored" if mode == "channels" else "uint8[C, H, W], 0 to 255",
        "exif_orientation": "applied" if upright else "not applied, except in TIFF files",
        **resized,
    }


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read all bytes of an image file.

    Raises:
        DataError: The file cannot be read, or is too large.
    """
    try:
        return read_bytes(path)
    except OSError as error:
        raise DataError(Problem(os.fspath(path), f"cannot be read: {error.strerror}")) from None


def decode_file(raw: bytes, path: str | os.PathLike[str], *, mode: Mode = "rgb") -> Tensor:
    """Decode a file's bytes to uint8[C, H, W].

    Raises:
        DataError: As `read_image` raises.
    """
    try:
        return decode(raw, mode=mode, name=os.fspath(path))
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise undecodable(raw, path, error, f"an image: {', '.join(FORMATS)}") from None


def undecodable(
    raw: bytes, path: str | os.PathLike[str], error: Exception, expected: str
) -> DataError:
    """Return the error for a file that cannot be decoded: what it is instead, or its damage."""
    if description := another_kind(raw, "image"):
        reason, hint = f"is {description}, not an image", ""
        if "photograph" in description:
            hint = "convert it, for example: magick NAME.heic NAME.jpg"
    else:
        hint = "remove the file, or download it again"
        # Pillow's own message holds the address of a buffer, which says nothing to a reader
        reason = (
            "is empty"
            if not raw
            else "is not an image, or is damaged"
            if isinstance(error, Image.UnidentifiedImageError)
            else f"is a damaged image: {first_line(error)}"
        )
    return DataError(Problem(os.fspath(path), reason, expected=expected, hint=hint))


def decode(raw: bytes, *, mode: Mode = "rgb", name: str = "image") -> Tensor:
    """Decode an image to uint8[C, H, W]; errors call it `name`.

    Raises:
        DataError: It has more pixels than the limit.
        ValueError, OSError, SyntaxError: Pillow cannot read a complete image from the bytes.
    """
    number, pillow = MODES[mode]
    # The operators are called directly: the functions of torchvision.io issue a deprecation warning
    # at each call, which takes longer than decoding a small image.
    operator = _operator(raw)
    if operator is not None:
        PIXELS.check(name, pixels_of(raw))
        require_no_excess(raw)
        try:
            stored = unpack_png(raw if mode == "rgb" else without_gamma(raw))
            image = operator(torch.frombuffer(bytearray(stored), dtype=torch.uint8), number)
            if image.dtype == torch.uint8:
                require_complete(raw, image.numpy())
                return image
        except RuntimeError:
            # Unsupported or damaged: Pillow says which
            pass
    return _decode_by_pillow(raw, pillow, name)


def _operator(raw: bytes):
    """Return the decoder for the file's first bytes; None if torchvision has none."""
    # A name may be wrong: ImageNet has a PNG named .JPEG
    name = (
        "decode_jpeg"
        if raw.startswith(b"\xff\xd8\xff")
        else "decode_png"
        if raw.startswith(b"\x89PNG\r\n\x1a\n") and raw[12:16] == b"IHDR"
        else ""
    )
    return getattr(torch.ops.image, name, None) if name else None


def pixels_of(raw: bytes) -> int:
    """Return the number of pixels of a JPEG or PNG, from its header."""
    if raw.startswith(b"\x89PNG"):
        return _product(raw[16:24], "!II")
    # Thumbnails have frames too: the largest of all that a decoder might take for the header counts
    frames = (match.groups() for match in _FRAME.finditer(raw))
    return max(
        (
            _product(high + wide, "!HH")
            for length, high, wide, parts in frames
            if length == struct.pack("!H", 8 + 3 * parts[0])
        ),
        default=0,
    )


def require_no_excess(raw: bytes) -> None:
    """Raise a ValueError for a PNG with much more data than pixels.

    Decoders unpack all of the data, possibly a thousandfold, before they notice.
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
    """Return a PNG without the chunks that define its brightness; other formats unchanged."""
    # With these chunks, libpng computes grey from linear light, otherwise from the stored numbers
    if not raw.startswith(b"\x89PNG") or not any(kind in raw for kind in _GAMMA):
        return raw
    parts, place = [raw[:8]], 8
    while place + 12 <= len(raw):
        length, kind = struct.unpack("!I4s", raw[place : place + 8])
        if kind == b"IDAT":
            break
        parts.append(b"" if kind in _GAMMA else raw[place : place + 12 + length])
        place += 12 + length
    return b"".join((*parts, raw[place:]))


def require_complete(raw: bytes, image: np.ndarray) -> None:
    """Raise a ValueError for a JPEG whose end marker comes before all of its pixels.

    libjpeg only prints a warning, without the file's name. It makes missing pixels grey, and a
    progressive image without its last scans is blurred.

    Args:
        raw: The file; other formats pass.
        image: uint8[C, H, W], decoded from it.
    """
    if not raw.startswith(b"\xff\xd8"):
        return
    if (frame := _PROGRESSIVE.search(raw)) and frame[1][0] > len(
        {scan[1] for scan in _LAST_BITS.finditer(raw, frame.end())}
    ):
        raise ValueError("its last scans are missing")
    # Further bytes change an image that lacks some, but not one that happens to end in grey
    if image[0, -1, -1] in _GREY and len(set(image[:, -1, -1].tolist())) == 1:
        start, end, rest = raw.rpartition(b"\xff\xd9")
        pixels, longer = (
            _decode_by_pillow(x, "L", "image") for x in (raw, start + _FURTHER + end + rest)
        )
        if not torch.equal(pixels, longer):
            raise ValueError("its pixels are cut short, and the rest would be grey")


def unpack_png(raw: bytes) -> bytes:
    """Return a PNG with the same pixels uncompressed; other formats unchanged.

    Raises:
        ValueError: The pixels are damaged or cut short.
    """
    # torchvision's decoder ends the process on damaged data, so zlib unpacks and checks it first
    if not raw.startswith(b"\x89PNG"):
        return raw
    wide, high, bits, colour, _, _, interlaced = struct.unpack("!IIBBBBB", raw[16:29])
    if colour not in _SAMPLES or bits not in (1, 2, 4, 8, 16) or interlaced > 1:
        raise ValueError("its header is not a valid PNG header")
    packed, first_data, place = list[bytes](), 0, 8
    while place + 12 <= len(raw):
        length, kind = struct.unpack("!I4s", raw[place : place + 8])
        if kind == b"IDAT":
            first_data = first_data or place
            if (
                zlib.crc32(raw[place + 4 : place + 8 + length]).to_bytes(4, "big")
                != raw[place + 8 + length : place + 12 + length]
            ):
                raise ValueError("its checksum does not match")
            packed.append(raw[place + 8 : place + 8 + length])
        elif packed:
            break
        place += 12 + length
    interlacing = _PASSES if interlaced else ((0, 0, 1, 1),)
    bits *= _SAMPLES[colour]
    sizes = [
        (-(-(high - first_row) // row_step), -(-(wide - first_column) // column_step))
        for first_column, first_row, column_step, row_step in interlacing
        if wide > first_column
    ]
    # The byte before each row names the row's filter
    passes = [(rows, 1 + (columns * bits + 7) // 8) for rows, columns in sizes]
    most = sum(rows * length for rows, length in passes)
    try:
        pixels = zlib.decompressobj().decompress(b"".join(packed), most)
    except zlib.error as error:
        raise ValueError(f"its pixels cannot be unpacked: {error}") from None
    if len(pixels) < most or not most:
        raise ValueError("its pixels are cut short")
    offset = 0
    for rows, length in passes:
        if rows and np.frombuffer(pixels, np.uint8, rows * length, offset)[::length].max() > 4:
            raise ValueError("its pixels are damaged")
        offset += rows * length
    stored = b"IDAT" + zlib.compress(pixels, 0)
    return b"".join(
        (
            raw[:first_data],
            struct.pack("!I", len(stored) - 4),
            stored,
            zlib.crc32(stored).to_bytes(4, "big"),
            b"\0\0\0\0IEND\xaeB`\x82",
        )
    )


def require_modest_tiles(image: Image.Image, name: str) -> None:
    """Raise a DataError for a TIFF whose tiles have more pixels than the limit."""
    # A tile or strip is decoded completely, however small its share of the image
    if image.format == "TIFF":
        tags: Any = getattr(image, "tag_v2", {})
        PIXELS.check(name, int(tags.get(_TILE_WIDTH, 0)) * int(tags.get(_TILE_HEIGHT, 0)))


def _product(raw: bytes, form: str) -> int:
    high, wide = struct.unpack(form, raw) if len(raw) == struct.calcsize(form) else (0, 0)
    return high * wide


def open_image(file: bytes | Path, name: str) -> Image.Image:
    """Open an image with Pillow, in one of the supported formats.

    Raises:
        DataError: It has more pixels than the limit.
        ValueError, OSError, SyntaxError, Image.DecompressionBombError: It is not an image.
    """
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "a file cut short is an error"
    # Pillow refuses more than twice MAX_IMAGE_PIXELS: its limit must not be the lower one
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, PIXELS.most)
    try:
        return Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        PIXELS.check(name, int(next(iter(re.findall(r"\d+", str(error))), 0)))
        raise


def has_wide_integers(image: Image.Image) -> bool:
    """Whether pixels of mode I come from a TIFF with more than 16 bits or negative numbers.

    In other files they have 16 bits.
    """
    tags = getattr(image, "tag_v2", {})
    return image.mode.startswith("I") and (
        max(tags.get(_BITS, (16,))) > 16 or _SIGNED in tags.get(_SAMPLE_FORMAT, ())
    )


def loses_bits(image: Image.Image) -> bool:
    """Whether Pillow reduces the pixels to 8 bits: TIFF and PPM with several samples per pixel.

    Call it before the pixels are loaded, which discards the information.
    """
    if image.mode.startswith(("I", "F")):
        return False
    # Pillow's PPM plugin stores the file's largest value in the tile's arguments
    largest_values = [
        tile.args[1]
        for tile in getattr(image, "tile", ())
        if image.format == "PPM" and isinstance(tile.args, tuple)
    ]
    return max((*getattr(image, "tag_v2", {}).get(_BITS, (8,)), 0)) > 8 or any(
        isinstance(most, int) and most > 255 for most in largest_values
    )


def _decode_by_pillow(raw: bytes, mode: str, name: str) -> Tensor:
    with open_image(raw, name) as image:
        PIXELS.check(name, image.width * image.height)
        require_modest_tiles(image, name)
        if image.mode in ("F", "LAB", "HSV") or has_wide_integers(image):
            raise DataError(
                Problem(
                    name,
                    f"has colours in {image.mode}"
                    if image.mode in ("LAB", "HSV")
                    else "has numbers of unknown range",
                    f"mode {image.mode}",
                    "grey, RGB, CMYK or a palette, of 8 or 16 bits",
                    "convert it; or read its numbers as they are, with "
                    "dataset=multichannel_folder, or dataset=class_folders dataset.mode=channels",
                )
            )
        # Pillow's own conversion from 16 bits clips at 255
        if image.mode.startswith("I"):
            values = np.asarray(image).astype(np.int64).clip(0, 65535)
            image = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
        pixels = np.array(image.convert(mode))
    return (
        torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None])
        .permute(2, 0, 1)
        .contiguous()
    )
