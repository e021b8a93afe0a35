"""Files in an untrusted data set take no more of the machine than the limits allow."""

import io
import multiprocessing
import os
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samewise.datasets.coco import COCO
from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.manifest import Manifest
from samewise.datasets.parts.audio_files import audio_info, read_audio
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.video_files import read_frames
from samewise.datasets.video_clips import VideoClips
from samewise.runner.errors import DataError

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
