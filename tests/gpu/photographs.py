"""JPEG files of several sizes, as a camera might take them, for decoding on a device. Uses only installed packages."""

from pathlib import Path

import numpy as np
from PIL import Image


def write(folder: Path, *, count: int, size: tuple[int, int]) -> Path:
    """`train` and `valid` below the folder, each with two classes of `count` files of about (width, height); every fourth is progressive."""
    drawn = np.random.default_rng(0)
    for split in ("train", "valid"):
        for name in ("one", "two"):
            (place := folder / split / name).mkdir(parents=True)
            for number in range(count):
                coarse = Image.fromarray(drawn.integers(0, 256, (24, 32, 3), dtype=np.uint8))
                width, height = (side + int(drawn.integers(side // 4)) for side in size)
                smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
                pixels = (smooth + drawn.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.jpg", quality=90, subsampling=2 * (number % 2), progressive=number % 4 == 3)
    return folder


def overrides(folder: Path, *, size: int, decode: str) -> list[str]:
    """The data set of such files, decoded by the worker or the device, cropped to `size`."""
    transforms = "imagenet_on_device" if decode == "device" else "imagenet"
    data = ["dataset=image_folder", f"dataset.root={folder}", "dataset.num_classes=2", "dataset.channels=3", f"dataset.decode={decode}"]
    return [*data, f"transforms={transforms}", f"transforms.size={size}", f"transforms.eval_resize={size + size // 8}"]
