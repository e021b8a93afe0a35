"""Images with several samples of 16 bits, which Pillow would read as 8, are refused."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from samewise.datasets.parts.channels import read_channels
from samewise.datasets.parts.decode import read_image
from samewise.runner.errors import DataError


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
