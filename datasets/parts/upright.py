"""Images turned by their EXIF orientation, as in the library `datasets`.

All other data sets take the pixels as they are stored.
"""

import os
from pathlib import Path

from PIL import ExifTags, Image
from torch import Tensor

from samewise.datasets.parts.decode import DAMAGED, Mode, decode_file, open_image, read_file
from samewise.runner.errors import DataError, Problem

_FLIPS: dict[object, tuple[int, ...]] = {
    2: (-1,),
    3: (-2, -1),
    4: (-2,),
    5: (),
    6: (-1,),
    7: (-2, -1),
    8: (-2,),
}
"""Dimensions to flip, by orientation; from 5 on after exchanging height and width."""

# Pillow would decode a whole PNG to look for an orientation
_IN_PNG = (b"eXIf", b"exif", b"adobe")
"""Marks, at least one of which is in each PNG that has an orientation."""


def orientation(path: Path) -> int:
    """Return a JPEG's EXIF orientation, 1 (as stored) to 8; 1 for other files.

    Only the header is read; damage shows when the file is decoded.
    """
    try:
        with open_image(path, str(path)) as image:
            value = image.getexif().get(ExifTags.Base.Orientation) if image.format == "JPEG" else 1
    except (*DAMAGED, DataError, Image.DecompressionBombError):
        return 1
    return value if value in _FLIPS else 1


def turn_upright(image: Tensor, raw: bytes, name: str) -> Tensor:
    """Turn an image by the EXIF orientation of its file; Pillow has already turned a TIFF.

    Args:
        image: uint8[C, H, W], decoded from the bytes.
        raw: The file's bytes.
        name: The file's name, for errors.

    Raises:
        DataError: The EXIF data cannot be read.
    """
    if raw.startswith(b"\x89PNG") and not any(mark in raw for mark in _IN_PNG):
        return image
    try:
        with open_image(raw, name) as opened:
            orientation = (
                1 if opened.format == "TIFF" else opened.getexif().get(ExifTags.Base.Orientation, 1)
            )
        flips = _FLIPS.get(orientation)
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise DataError(
            Problem(
                name,
                f"has EXIF data that are damaged: {type(error).__name__}",
                hint="save the image again, without them",
            )
        ) from None
    if flips is None:
        return image
    return (image if orientation < 5 else image.transpose(-2, -1)).flip(flips)


def read_upright(path: str | os.PathLike[str], *, mode: Mode = "rgb") -> Tensor:
    """Read an image file as `read_image` does, and turn it upright.

    Raises:
        DataError: As `read_image` and `turn_upright` raise.
    """
    raw = read_file(path)
    return turn_upright(decode_file(raw, path, mode=mode), raw, os.fspath(path))
