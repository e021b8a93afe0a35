"""A damaged image raises an error that names its file and does not end the process; an intact one has the pixels that Pillow reads."""

import io
import multiprocessing
import os
import resource
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samewise.datasets.coco import COCO
from samewise.datasets.hugging_face import HuggingFaceImages
from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.image_table import ImageTable
from samewise.datasets.manifest import Manifest
from samewise.datasets.parts.audio_files import audio_info, read_audio
from samewise.datasets.parts.channels import read_channels
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.video_files import read_frames
from samewise.datasets.pascal_voc import PascalVOC
from samewise.datasets.video_clips import VideoClips
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


MOST_MIB = 300
"""More than a decoder needs to read a header, and far less than what the headers here claim."""


def jpeg(width: int, height: int, *, before: bytes = b"") -> bytes:
    """A small grey JPEG whose frame header claims another size."""
    out = io.BytesIO()
    Image.new("L", (8, 8)).save(out, "JPEG")
    raw = bytearray(out.getvalue())
    frame = raw.index(b"\xff\xc0")
    raw[frame + 5 : frame + 9] = struct.pack("!HH", height, width)
    return bytes(raw[:2]) + before + bytes(raw[2:])


def png(width: int, height: int) -> bytes:
    """A PNG of one bit a pixel: all black, so 900 million pixels are a file of 110 kB."""
    packed = zlib.compressobj(9)
    row = b"\0" * (1 + -(-width // 8))
    rows = b"".join(packed.compress(row * 1000) for _ in range(height // 1000)) + packed.flush()

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack("!I", len(body)) + name + body + struct.pack("!I", zlib.crc32(name + body))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack("!IIBBBBB", width, height, 1, 0, 0, 0, 0)) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 58, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0) + b"\0" * 4


def tiff(width: int, height: int) -> bytes:
    entries = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 5), (262, 3, 1), (273, 4, 200), (277, 3, 1), (278, 4, height), (279, 4, 4)]
    body = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries) + b"\0" * 4
    return (b"II*\0" + struct.pack("<I", 8) + body).ljust(204, b"\0")


def webp(width: int, height: int) -> bytes:
    """An empty canvas, and a frame of 1 x 1 in it."""
    out = io.BytesIO()
    Image.new("RGB", (1, 1)).save(out, "WEBP", lossless=True)
    inner = out.getvalue()[12:]
    frame = b"\0" * 12 + b"\0\0\0\0" + inner
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    parts = ((b"VP8X", b"\x02\0\0\0" + size), (b"ANIM", b"\0" * 6), (b"ANMF", frame))
    body = b"WEBP" + b"".join(name + struct.pack("<I", len(part)) + part for name, part in parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


IMAGES = {
    "jpeg": jpeg(65500, 65500),
    "jpeg after another frame": jpeg(65500, 65500, before=b"\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01\x01\x11\x00"),
    "png": png(30000, 30000),
    "bmp": bmp(30000, 30000),
    "ppm": b"P6 30000 30000 255\n",
    "tiff": tiff(60000, 60000),
    "webp": webp(16384, 16384),
}


def wav(rate: int, *, samples: int = 1000) -> bytes:
    sound = b"\0\0" * samples
    form = struct.pack("<HHIIHH", 1, 1, rate, rate * 2 % 2**32, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(sound)) + sound
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _measure(read: Callable[[], Any], tell: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read()
        said = "nothing"
    except DataError as error:
        said = str(error)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    tell.send((said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def refusal(read: Callable[[], Any], *, within_s: float = 60) -> str:
    """The message of a DataError raised in a separate process, which must end and take little memory."""
    forks = multiprocessing.get_context("fork")
    here, there = forks.Pipe(duplex=False)
    child = forks.Process(target=_measure, args=(read, there))
    child.start()
    try:
        assert here.poll(within_s), "it hangs"
        said, grown = here.recv()
    finally:
        child.kill()
        child.join()
    assert grown < MOST_MIB, f"took {grown:.0f} MiB; {said}"
    return said


@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_whose_header_claims_too_much_is_refused_before_decoding(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(IMAGES[kind])
    said = refusal(lambda: read_image(path))
    assert said.startswith(f"{path}: has ")
    assert "SAMEWISE_MAX_PIXELS=" in said
    assert "at most 100,000,000" in said


SPECIAL: dict[str, Callable[[Path], object]] = {"pipe": os.mkfifo, "endless": lambda path: path.symlink_to("/dev/zero"), "folder": lambda path: path.mkdir()}


@pytest.mark.usefixtures("ffmpeg")
@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    """Every way in which a data set opens a file: a pipe without a writer would block, and /dev/zero never ends."""
    Image.new("L", (8, 8)).save(tmp_path / "honest.png")
    for name in ("train/x/strange.png", "train/x/strange.wav", "train/x/strange.mp4", "strange.json", "strange.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        SPECIAL[kind](tmp_path / name)
    here = tmp_path / "train" / "x"
    reads: list[Callable[[], Any]] = [
        lambda: read_image(here / "strange.png"),
        lambda: ImageFolder(root=str(tmp_path), folder="train").fingerprint(),
        lambda: read_audio(here / "strange.wav"),
        lambda: audio_info(here / "strange.wav"),
        lambda: read_frames(here / "strange.mp4", range),
        lambda: VideoClips(root=str(tmp_path), folder="train").fingerprint(),
        lambda: COCO(root=str(tmp_path), images="", annotations="strange.json"),
        lambda: Manifest(file=str(tmp_path / "strange.csv")),
    ]
    for number, read in enumerate(reads):
        said = refusal(read, within_s=20)
        assert "not a regular file" in said or (kind == "folder" and "has no " in said), (number, said)
