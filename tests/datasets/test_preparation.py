"""What data sets say of how they read files is enough to read them elsewhere: here with Pillow and soundfile."""

import json
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
