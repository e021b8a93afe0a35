"""A file of another kind than requested is reported as what it is; and what data sets say of how they read files is enough to read them elsewhere."""

import gzip
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import torchaudio
from PIL import ExifTags, Image, ImageOps
from samewise_datasets_pictured import pictures
from torch import Tensor

from samewise.datasets.coco import COCO
from samewise.datasets.hugging_face import HuggingFaceImages
from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.labelled_recordings import LabelledRecordings
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


PHOTO = Image.fromarray(pictures(1, 48, 64)[0].permute(1, 2, 0).numpy())


def photo(path: Path) -> Path:
    """A picture that is to be turned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    PHOTO.save(path, exif=exif)
    return path


def annotated(root: Path) -> COCO:
    photo(root / "images" / "one.png")
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 10, 20], "area": 200, "iscrowd": 0}
    images = [{"id": 1, "file_name": "one.png", "width": 64, "height": 48}]
    (root / "boxes.json").write_text(json.dumps({"images": images, "categories": [{"id": 1, "name": "cell"}], "annotations": [box]}))
    return COCO(root=str(root), images="images", annotations="boxes.json", size=[18, 40])


def turned(root: Path) -> HuggingFaceImages:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"bytes": photo(root / "one.png").read_bytes(), "path": None}]
    parquet.write_table(pa.table({"photo": rows, "kind": [0]}), root / "train.parquet")
    return HuggingFaceImages(root=str(root), split="train", image="photo", label="kind", shares={}, upright=True)


def in_grey(root: Path) -> ImageFolder:
    photo(root / "train" / "cell" / "one.png")
    return ImageFolder(root=str(root), folder="train", mode="gray")


def follow(file: Path, said: dict[str, Any]) -> Tensor:
    image = Image.open(file)
    image = ImageOps.exif_transpose(image) if said["exif_orientation"] == "applied" else image
    image = image.convert({"rgb": "RGB", "gray": "L"}[said["colours"]])
    image = image.resize(said["size"][::-1], Image.Resampling.BILINEAR) if "size" in said else image
    return torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1).permute(2, 0, 1)


@pytest.mark.parametrize("make", [annotated, turned, in_grey], ids=["resized", "turned", "grey"])
def test_pillow_gives_the_image_that_the_preparation_describes(make: Callable[[Path], Any], tmp_path: Path) -> None:
    data = make(tmp_path)
    found, expected = data[0]["image"], follow(next(tmp_path.rglob("one.png")), json.loads(json.dumps(data.preparation)))
    assert found.shape == expected.shape
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("length", [3000, 9000])
def test_soundfile_gives_the_waveform_that_the_preparation_describes(length: int, tmp_path: Path) -> None:
    (tmp_path / "dog").mkdir()
    soundfile.write(tmp_path / "dog" / "one.wav", np.random.default_rng(0).uniform(-0.9, 0.9, (length, 2)), 16000, subtype="FLOAT")
    data = LabelledRecordings(root=str(tmp_path), split="valid", pattern="(?P<label>dog)/(?P<valid>.+)", shares={}, seconds=0.3, sample_rate=8000)
    said = data.preparation
    heard, rate = soundfile.read(tmp_path / "dog" / "one.wav", dtype="float32")
    waveform = torchaudio.functional.resample(torch.from_numpy(heard).mean(1), rate, said["sample_rate"])
    spare = len(waveform) - said["samples"]
    expected = waveform[spare // 2 : spare // 2 + said["samples"]] if spare > 0 else torch.nn.functional.pad(waveform, (0, -spare))
    assert torch.allclose(data[0]["waveform"], expected, atol=1e-5)
