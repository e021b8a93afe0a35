"""A damaged image raises an error that names its file and does not end the process; an intact one has the pixels that Pillow reads."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
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


def interlaced(rows: list[bytes]) -> bytes:
    """A grey image of 1 x 1 in Adam7: its first pass alone."""
    chunks = ((b"IHDR", struct.pack("!IIBBBBB", 1, 1, 8, 0, 0, 0, 1)), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data)) for kind, data in chunks)


@pytest.mark.parametrize("level", [0, 6])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_an_intact_png_has_the_pixels_that_pillow_reads(tmp_path: Path, mode: str, level: int) -> None:
    (tmp_path / "a.png").write_bytes(raw := draw_png(mode, compress_level=level))
    expected = np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))
    assert torch.equal(read_image(tmp_path / "a.png"), torch.from_numpy(expected.copy()).permute(2, 0, 1))


@pytest.mark.parametrize(("mode", "channels"), [("1", 1), ("L", 1), ("LA", 2), ("P", 3), ("RGB", 3), ("RGBA", 4), ("I;16", 1)])
def test_the_stored_channels_of_a_png_are_those_that_pillow_reads(tmp_path: Path, mode: str, channels: int) -> None:
    (tmp_path / "a.png").write_bytes(raw := draw_png(mode))
    image = Image.open(io.BytesIO(raw))
    stored = np.asarray(image.convert({"1": "L", "P": "RGB"}.get(mode, mode)))
    expected = torch.from_numpy(stored.astype(np.int64)).reshape(13, 18, channels).permute(2, 0, 1)
    found = read_channels(tmp_path / "a.png", channels)
    assert torch.equal(found.to(torch.int64) if not found.is_floating_point() else (found * 65535).round().to(torch.int64), expected)


def test_an_interlaced_png_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(interlaced([b"\0\x07"]))
    assert read_image(tmp_path / "a.png").tolist() == [[[7]]] * 3


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


@pytest.mark.parametrize("kept", [17, 20, 25, 30, 60, 300])
def test_a_truncated_png_raises_an_error_that_names_it(tmp_path: Path, kept: int) -> None:
    (tmp_path / "a.png").write_bytes(draw_png("RGB")[:kept])
    for read in (read_image, lambda path: read_channels(path, 3)):
        with pytest.raises(DataError, match=r"a\.png"):
            read(tmp_path / "a.png")


HUGE = b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999, 99999, 5), }"


@pytest.mark.parametrize("header", [HUGE, b"{'descr': [(", b"{'descr': '|O', 'shape': (2,2)}", b"(" * 4000])
def test_an_array_with_a_false_header_raises_an_error_that_names_it(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(64))
    with pytest.raises(DataError, match=r"a\.npy"):
        read_channels(tmp_path / "a.npy", 5)


def test_pages_are_counted_only_up_to_the_limit(tmp_path: Path) -> None:
    pages = [Image.new("L", (2, 2), number) for number in range(40)]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match="has more than 5 pages"):
        read_channels(tmp_path / "a.tif", 5)
    assert read_channels(tmp_path / "a.tif", 40).shape == (40, 2, 2)
