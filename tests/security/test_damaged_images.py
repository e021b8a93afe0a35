"""A damaged image raises an error that names its file and does not end the process; an intact one has the pixels that Pillow reads."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from samewise.datasets.parts.channels import read_channels
from samewise.datasets.parts.decode import read_image
from samewise.runner.errors import DataError


def draw_png(mode: str, **options: object) -> bytes:
    generator = np.random.default_rng(0)
    shape = (13, 18, {"RGB": 3, "RGBA": 4, "LA": 2}.get(mode, 1))
    pixels = generator.integers(0, 1 << 16 if mode == "I;16" else 256, shape)
    image = Image.fromarray(pixels.astype(np.uint16 if mode == "I;16" else np.uint8).squeeze())
    if mode in ("1", "P"):
        image = image.convert("1") if mode == "1" else image.convert("RGB").quantize(13)
    image.save(held := io.BytesIO(), "PNG", **options)
    return held.getvalue()


@pytest.mark.parametrize("place", [3, 90, 400])
@pytest.mark.parametrize("mended", [False, True])
def test_a_damaged_png_raises_an_error_that_names_it(tmp_path: Path, place: int, mended: bool) -> None:
    """torchvision's decoder ended the process by a signal, without a message."""
    raw = bytearray(draw_png("RGB"))
    start = raw.index(b"IDAT")
    (length,) = struct.unpack("!I", raw[start - 4 : start])
    raw[start + 4 + place] ^= 0xFF
    if mended:  # the chunk's checksum is right, what it holds is not
        raw[start + 4 + length : start + 8 + length] = struct.pack("!I", zlib.crc32(raw[start : start + 4 + length]))
    (tmp_path / "a.png").write_bytes(raw)
    for read in (read_image, lambda path: read_channels(path, 3)):
        with pytest.raises(DataError, match=r"a\.png"):
            read(tmp_path / "a.png")


HUGE = b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999, 99999, 5), }"


@pytest.mark.parametrize("header", [HUGE, b"{'descr': [(", b"{'descr': '|O', 'shape': (2,2)}", b"(" * 4000])
def test_an_array_with_a_false_header_raises_an_error_that_names_it(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(64))
    with pytest.raises(DataError, match=r"a\.npy"):
        read_channels(tmp_path / "a.npy", 5)
