"""A file of another kind than requested is reported as what it is. Pillow, soundfile and Python's standard library write the files."""

import gzip
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from samewise.datasets.parts.audio_files import read_audio
from samewise.datasets.parts.channels import read_channels
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.file_kinds import another_kind
from samewise.runner.errors import DataError

SOUND = 0.1 * np.sin(np.arange(4000) * 0.1)
IMAGES = {"JPEG": "a JPEG", "PNG": "a PNG", "GIF": "a GIF", "BMP": "a BMP", "TIFF": "a TIFF", "WEBP": "a WebP"}


def picture(path: Path, form: str = "PNG") -> Path:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path, form)
    return path


def recording(path: Path, form: str = "WAV") -> Path:
    soundfile.write(path, SOUND, 8000, format=form)
    return path


def pack(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__)


@pytest.mark.parametrize("form", IMAGES)
def test_an_image_is_distinguished_from_a_recording(form: str, tmp_path: Path) -> None:
    file = picture(tmp_path / "a.wav", form)
    assert another_kind(file, "image") is None
    assert another_kind(file, "recording") == f"{IMAGES[form]} image"
    with pytest.raises(DataError, match=f"a.wav: is {IMAGES[form]} image, not a recording"):
        read_audio(file)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"), "a ZIP archive"),
        (lambda path: torch.save({"a": torch.zeros(1)}, path), "torch.save"),
        (lambda path: gzip.open(path, "w").close(), "a gzip archive"),
        (pack, "a tar archive"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "a Git LFS pointer"),
        (lambda path: path.write_text("<!DOCTYPE html><title>404</title>"), "an HTML page"),
        (lambda path: path.write_text("sound/1.wav\tun caf\u00e9\n" * 40, encoding="utf-8"), "a text"),
    ],
)
def test_an_archive_pointer_page_or_list_is_named_as_one(write: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert all(words in str(another_kind(tmp_path / "a", kind)) for kind in ("image", "recording", "video"))


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"hevc", b"mif1", b"avif", b"avis"])
def test_a_photograph_of_a_telephone_is_no_video(tmp_path: Path, brand: bytes) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\0\0\0\x18ftyp" + brand + bytes(64))
    with pytest.raises(DataError, match=r"a\.jpg: is a HEIC or AVIF photograph, not an image; hint: convert it, for example: magick"):
        read_image(tmp_path / "a.jpg")


def tiff(values: np.ndarray) -> bytes:
    """A TIFF of 16 bits with the channels [C, H, W] as samples of a pixel, which Pillow cannot write."""
    channels, height, width = values.shape
    pixels = values.transpose(1, 2, 0).astype("<u2").tobytes()
    bits = struct.pack(f"<{channels}H", *[16] * channels)
    begin = 8 + len(bits)
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, channels, 8), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, begin), (277, 3, 1, channels)]
    tags += [(278, 3, 1, height), (279, 4, 1, len(pixels)), (284, 3, 1, 1), *([(338, 3, 1, 2)] if channels == 4 else [])]
    listed = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", begin + len(pixels)) + bits + pixels + listed


def ppm(values: np.ndarray) -> bytes:
    return b"P6\n%d %d\n65535\n" % values.shape[:0:-1] + values.transpose(1, 2, 0).astype(">u2").tobytes()


@pytest.mark.parametrize(("name", "channels", "form"), [("a.tif", 3, tiff), ("a.tif", 4, tiff), ("a.ppm", 3, ppm)])
def test_samples_of_16_bits_that_would_be_read_as_8_are_refused(tmp_path: Path, name: str, channels: int, form: Callable[[np.ndarray], bytes]) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (channels, 12, 10)).astype(np.uint16)
    (tmp_path / name).write_bytes(form(values))
    with pytest.raises(DataError, match=rf"{name}: has pixels of several samples of more than 8 bits(.|\n)*to PNG"):
        read_channels(tmp_path / name, channels)
    assert (read_image(tmp_path / name)[:3].float() - torch.from_numpy(values[:3] / 257).float()).abs().max() <= 1  # colours of 8 bits are what was asked for
