"""Images of a Hugging Face data set have the pixels that the library `datasets` gives them, turned by their EXIF orientation; so have files in prediction."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from samewise.datasets.hugging_face import HuggingFaceImages
from samewise.datasets.parts.upright import read_upright
from samewise.runner.errors import DataError

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 3)).astype(np.uint8))


def encoded(orientation: int, form: str = "PNG") -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    PHOTO.save(file, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    return file.getvalue()


def images(root: Path, **settings: Any) -> HuggingFaceImages:
    return HuggingFaceImages(root=str(root), split="train", image="photo", label="kind", shares={}, **settings)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_pillow_turns_it(orientation: int, form: str, tmp_path: Path) -> None:
    """The library calls `exif_transpose` on what it has loaded."""
    (tmp_path / "photo").write_bytes(raw := encoded(orientation, form))
    with Image.open(io.BytesIO(raw)) as opened:
        opened.load()
        expected = pixels(ImageOps.exif_transpose(opened).convert("RGB"))
    found = read_upright(tmp_path / "photo")
    assert found.shape == expected.shape == ((3, 9, 6) if 5 <= orientation <= 8 else (3, 6, 9))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "holds nothing; hint: leave such rows out"),
        ({"bytes": None, "path": None}, "holds nothing; hint: leave such rows out"),
        ([{"bytes": b"", "path": None}], "holds list; hint: dataset.image=COLUMN names another column"),
        ([[0, 255], [255, 0]], "holds list; hint: dataset.image=COLUMN names another column"),
    ],
)
def test_a_column_without_one_image_in_each_row_is_an_error(value: Any, words: str, tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"photo": [value], "kind": [0]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=f"row 0: column photo {words}"):
        images(tmp_path).fingerprint()
