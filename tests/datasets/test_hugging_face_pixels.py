"""Images of a Hugging Face data set have the pixels that the library `datasets` gives them, turned by their EXIF orientation; so have files in prediction."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from samewise.datasets.parts.upright import read_upright

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 3)).astype(np.uint8))


def encoded(orientation: int, form: str = "PNG") -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    PHOTO.save(file, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    return file.getvalue()


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
