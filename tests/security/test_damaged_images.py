"""A damaged image raises an error that names its file and does not end the process; an intact one has the pixels that Pillow reads."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from samewise.datasets.hugging_face import HuggingFaceImages
from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.image_table import ImageTable
from samewise.datasets.parts.channels import read_channels
from samewise.datasets.parts.decode import read_image
from samewise.datasets.pascal_voc import PascalVOC
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


def draw_jpeg(*, size: tuple[int, int] = (96, 80), mode: str = "RGB", ends_grey: bool = False, **options: object) -> bytes:
    """A picture of (width, height) with noise, or with a lower half of the grey that libjpeg gives to missing pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    if ends_grey:
        pixels[size[1] // 2 // 16 * 16 :] = 128
    Image.fromarray(pixels).convert(mode).save(held := io.BytesIO(), "JPEG", **options)
    return held.getvalue()


JPEGS: list[dict[str, object]] = [
    {},
    {"mode": "L"},
    {"optimize": True, "subsampling": 0},
    {"progressive": True},
    {"restart_marker_blocks": 2},
    {"quality": 98, "size": (61, 35)},
]


def every_reader(root: Path, raw: bytes) -> dict[str, Callable[[], object]]:
    """What reads a JPEG's bytes: a folder's worker and device, a table, boxes, channels, and rows of Hugging Face's."""
    from pyarrow import parquet, table

    with Image.open(io.BytesIO(raw)) as image:
        (width, height), count = image.size, len(image.getbands())
    for split in ("train", "valid"):
        (root / split / "a").mkdir(parents=True)
        (root / split / "a" / "x.jpg").write_bytes(raw)
    (root / "list.csv").write_text("image,label\ntrain/a/x.jpg,a\n")
    parquet.write_table(table({"image": [{"bytes": raw, "path": "x.jpg"}], "label": ["a"]}), root / "x.jpg.parquet")
    size = f"<size><width>{width}</width><height>{height}</height></size>"
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
    (root / "x.xml").write_text(f"<annotation>{size}<object><name>a</name>{box}</object></annotation>")
    folder = partial(ImageFolder, root=str(root), folder="train")
    return {
        "worker": lambda: folder()[0]["image"],
        "memory": lambda: folder(cache="memory")[0]["image"],
        "device": lambda: folder(decode="device")[0]["image"].decode(torch.device("cpu"))[0],
        "channels": lambda: folder(mode="channels", channels=count)[0]["image"],
        "table": lambda: ImageTable(table_path=str(root / "list.csv"), split="train", shares={})[0]["image"],
        "boxes": lambda: PascalVOC(root=str(root), split="train", images_dir="train/a", annotations_dir="", shares={})[0]["image"],
        "rows": lambda: HuggingFaceImages(root=str(root / "x.jpg.parquet"), split="train", shares={})[0]["image"],
    }


@pytest.mark.parametrize("options", [*JPEGS, {"mode": "CMYK"}])
def test_a_jpeg_cut_short_before_an_end_marker_is_refused_by_every_reader(tmp_path: Path, options: dict[str, object]) -> None:
    """libjpeg only warns of it, and Pillow returns an image: half of it grey, or a blurred one."""
    raw = draw_jpeg(**options)
    cut = raw[: len(raw) // 2].rstrip(b"\xff") + b"\xff\xd9"
    assert Image.open(io.BytesIO(cut)).convert("RGB").size == Image.open(io.BytesIO(raw)).size
    for read in every_reader(tmp_path, cut).values():
        with pytest.raises(DataError, match=r"x\.jpg.*: is a damaged image: its (pixels are cut short|last scans are missing)"):
            read()


@pytest.mark.parametrize("options", JPEGS)
@pytest.mark.parametrize("rest", [b"", b"\0\0more", b"\xff\xd9"])
def test_a_jpeg_that_ends_in_grey_has_the_pixels_that_pillow_reads(
    tmp_path: Path, options: dict[str, object], rest: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = draw_jpeg(ends_grey=True, **options) + rest  # pyright: ignore[reportArgumentType]
    for name, read in every_reader(tmp_path, raw).items():
        with Image.open(io.BytesIO(raw)) as image:
            pixels = np.array(image if name == "channels" else image.convert("RGB"))
        assert (pixels[-1, -1] == 128).all()
        assert np.array_equal(read(), np.atleast_3d(pixels).transpose(2, 0, 1))  # pyright: ignore[reportArgumentType]
    assert not capfd.readouterr().err


@pytest.mark.parametrize("form", ["PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP"])
@pytest.mark.parametrize("share", [0.4, 0.9])
def test_an_image_cut_short_is_refused(tmp_path: Path, form: str, share: float) -> None:
    Image.open(io.BytesIO(draw_jpeg())).save(held := io.BytesIO(), form)
    (tmp_path / "x.jpg").write_bytes(held.getvalue()[: int(share * len(held.getvalue()))])
    with pytest.raises(DataError, match=r"x\.jpg: is (a damaged image|not an image, or is damaged)"):
        read_image(tmp_path / "x.jpg")
