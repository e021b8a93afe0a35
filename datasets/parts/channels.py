"""Reads images with any number of channels and more than 8 bits, and tensors of any shape.

Formats are NPY, TIFF (several samples or pages), PNG of 8 or 16 bits, and other image formats.
"""

import io
import os
import tokenize

import numpy as np
import torch
import torchvision.io  # registers the decoders
from PIL import ImageSequence
from torch import Tensor

from samewise.datasets.parts.decode import (
    DAMAGED,
    has_wide_integers,
    loses_bits,
    open_image,
    pixels_of,
    read_file,
    require_complete,
    require_modest_tiles,
    require_no_excess,
    undecodable,
    unpack_png,
)
from samewise.datasets.parts.limits import PIXELS
from samewise.runner.errors import DataError, Problem, first_line, number_of


def read_channels(path: str | os.PathLike[str], channels: int) -> Tensor:
    """Read the channels of an image file as stored.

    An NPY array is [H, W], [C, H, W] or [H, W, C]: the channel axis is the one of length C, the
    first if both are. The pages of a TIFF are channels too, in their order. A palette is resolved
    to its colours. In a TIFF or PPM, several samples per pixel have 8 bits.

    Args:
        path: The file.
        channels: The expected number of channels, C.

    Returns:
        [C, H, W]: uint8 unchanged, uint16 divided by 65535 to float32 in [0, 1], floating point as
            float32.

    Raises:
        DataError: The file cannot be read, is damaged, or has another number of channels.
    """
    name, raw = os.fspath(path), read_file(path)
    try:
        image = torch.from_numpy(_floats(_array(raw, name, channels), name))
    except (*DAMAGED, RuntimeError) as error:
        expected = (
            "an .npy array, or a TIFF, PNG or other image; convert other TIFFs, such as those "
            "with five or more channels in one page, to .npy"
        )
        raise undecodable(raw, path, error, expected) from None
    if len(image) != channels:
        count = len(image)
        raise DataError(
            Problem(
                name,
                f"has {number_of(count, 'channel')}",
                expected=f"{channels}, as dataset.channels says",
                hint=f"dataset.channels={count}, with a number for each in dataset.mean and "
                "dataset.std",
            )
        )
    return image


def read_tensor(path: str | os.PathLike[str]) -> Tensor:
    """Read the array of an `.npy` file, or the tensor that `torch.save` wrote.

    Returns:
        The tensor in its stored shape and type; floating point as float32.

    Raises:
        DataError: The file cannot be read, or holds anything else.
    """
    raw = read_file(path)
    try:
        tensor = torch.as_tensor(
            _load_npy(raw)
            if raw.startswith(b"\x93NUMPY")
            else torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        )
    # torch.load raises errors of many kinds for a damaged file
    except Exception as error:
        raise DataError(
            Problem(
                os.fspath(path),
                f"is not an array or a tensor: {first_line(error)}",
                expected="an array that numpy.save wrote, or a tensor that torch.save wrote",
            )
        ) from None
    return tensor.float() if tensor.is_floating_point() else tensor


def _array(raw: bytes, name: str, channels: int) -> np.ndarray:
    """Return [C, H, W] in the stored type."""
    if raw.startswith(b"\x93NUMPY"):
        array = _load_npy(raw)
        if array.ndim == 3 and array.shape[0] != channels and array.shape[2] == channels:
            array = array.transpose(2, 0, 1)
        if array.ndim not in (2, 3) or not array.size:
            raise DataError(
                Problem(
                    name,
                    "is an array of the wrong shape",
                    list(array.shape),
                    f"[{channels}, height, width] or [height, width, {channels}]",
                )
            )
        return array[None] if array.ndim == 2 else array
    # torchvision's decoder returns uninitialised memory for palettes and for pixels that share a
    # byte: those files go to Pillow below
    if (
        raw.startswith(b"\x89PNG\r\n\x1a\n")
        and raw[12:16] == b"IHDR"
        and raw[24:25] >= b"\x08"
        and raw[25:26] != b"\x03"
    ):
        PIXELS.check(name, pixels_of(raw))
        require_no_excess(raw)
        stored = torch.frombuffer(bytearray(unpack_png(raw)), dtype=torch.uint8)
        return torch.ops.image.decode_png(
            stored, int(torchvision.io.ImageReadMode.UNCHANGED.value)
        ).numpy()
    parts, total = list[np.ndarray](), 0
    with open_image(raw, name) as opened:
        for page in ImageSequence.Iterator(opened):
            # Pillow takes quadratic time to count a file's pages: the first page too many ends it
            if len(parts) > channels:
                raise DataError(
                    Problem(
                        name,
                        f"has more than {channels} pages",
                        expected=f"{channels} channels, as dataset.channels says",
                    )
                )
            total += page.width * page.height
            PIXELS.check(name, total)
            require_modest_tiles(opened, name)
            if loses_bits(page):
                raise DataError(
                    Problem(
                        name,
                        "has pixels of several samples of more than 8 bits, which Pillow "
                        "reads as 8",
                        expected="several samples of 8 bits, or one",
                        hint="convert it: to PNG (up to 4 channels), to .npy, or to a TIFF with a "
                        "page for each channel",
                    )
                )
            stored = {"P": "RGBA" if "transparency" in page.info else "RGB", "1": "L"}.get(
                page.mode, page.mode
            )
            part = np.array(page.convert(stored) if stored != page.mode else page)
            if page.mode == "I" and not has_wide_integers(page):
                part = part.astype(np.uint16)
            parts.append(part[None] if part.ndim == 2 else part.transpose(2, 0, 1))
    if len({part.shape[1:] for part in parts}) > 1:
        raise DataError(
            Problem(
                name,
                "has pages of several sizes",
                [list(part.shape[1:]) for part in parts[:5]],
                "one size, a page for each channel",
            )
        )
    image = np.concatenate(parts)
    require_complete(raw, image)
    return image


def _load_npy(raw: bytes) -> np.ndarray:
    """Load an NPY array; any damage is a ValueError."""
    # NumPy allocates the array that the header declares before it reads the content
    try:
        return np.load(io.BytesIO(raw), allow_pickle=False)
    except (MemoryError, OverflowError):
        raise ValueError("the file is shorter than its header says") from None
    except (TypeError, tokenize.TokenError, RecursionError):
        raise ValueError("its header is damaged") from None


def _floats(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == bool:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind == "u" and array.dtype.itemsize == 2:
        return (array.astype(np.float32) / np.float32(65535)).astype(np.float32)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise DataError(
                Problem(name, "contains values that are not finite", expected="numbers")
            )
        return np.ascontiguousarray(array, dtype=np.float32)
    raise DataError(
        Problem(
            name,
            "contains values of an unsupported type",
            str(array.dtype),
            "uint8, uint16, or floating point",
        )
    )
