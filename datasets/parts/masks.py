"""Masks: class maps in image files, and objects' masks as COCO's run lengths."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as run_lengths
from torch import Tensor

from samewise.datasets.parts.decode import (
    DAMAGED,
    open_image,
    read_file,
    require_no_excess,
    undecodable,
)
from samewise.datasets.parts.limits import PIXELS
from samewise.runner.errors import DataError, Problem

IGNORED = 255
"""The label of pixels that do not count."""


def read_class_map(path: str | os.PathLike[str]) -> Tensor:
    """Read uint8[H, W] from an image file whose pixels are class numbers: grey or a palette.

    Raises:
        DataError: The file is damaged, or has colours or more than 8 bits.
    """
    raw, name = read_file(path), os.fspath(path)
    try:
        require_no_excess(raw)
        with open_image(raw, name) as image:
            PIXELS.check(name, image.width * image.height)
            if image.mode not in ("L", "P", "1"):
                raise DataError(
                    Problem(
                        name,
                        "is not a map of classes",
                        f"mode {image.mode}",
                        "a number from 0 to 255 for each pixel: grey, or a palette",
                        "save it as a PNG of 8 bits, grey",
                    )
                )
            return torch.from_numpy(np.array(image).astype(np.uint8))
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise undecodable(raw, path, error, "an image of class numbers") from None


def encode(masks: Tensor) -> list[bytes]:
    """Return the run lengths of uint8[N, H, W]."""
    return [
        entry["counts"]
        for entry in run_lengths.encode(np.asfortranarray(masks.permute(1, 2, 0).numpy()))
    ]


def decode(encoded: Sequence[bytes], height: int, width: int) -> Tensor:
    """Return uint8[N, H, W] of N masks' run lengths."""
    if not encoded:
        return torch.zeros(0, height, width, dtype=torch.uint8)
    return (
        torch.from_numpy(
            run_lengths.decode([{"size": [height, width], "counts": counts} for counts in encoded])
        )
        .permute(2, 0, 1)
        .contiguous()
    )


def encode_annotation(segmentation: Any, height: int, width: int) -> bytes:
    """Return the run lengths of a COCO annotation: polygons, or run lengths in either form.

    Raises:
        DataError: It is none of these, or does not fit its image; the error has no place yet.
    """
    try:
        return _counts(segmentation, height, width)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(
            Problem(
                "",
                "has no valid segmentation",
                segmentation,
                "polygons [[x1, y1, x2, y2, x3, y3, ...], ...] in pixels, or run lengths of "
                f"{height} x {width} pixels",
            )
        ) from None


def _counts(segmentation: Any, height: int, width: int) -> bytes:
    size = [height, width]
    if not isinstance(segmentation, dict):
        corners = [np.asarray(x, dtype=np.float64).reshape(-1, 2) for x in segmentation]
        middle = np.array([width, height]) / 2
        # A line to a point far outside would take memory for each pixel on its way
        if not corners or not all(
            len(x) > 2 and (abs(x - middle) <= 3 * middle).all() for x in corners
        ):
            raise ValueError
        polygons = [x.flatten().tolist() for x in corners]
        return run_lengths.merge(run_lengths.frPyObjects(polygons, *size))["counts"]
    counts: Any = segmentation["counts"]
    if isinstance(counts, list):
        if not all(type(x) is int and x >= 0 for x in counts) or sum(counts) != height * width:
            raise ValueError
        return run_lengths.frPyObjects({"size": size, "counts": counts}, *size)["counts"]
    # pycocotools leaves pixels that no run covers as they were in memory
    if encode(decode([counts.encode()], *size)) != [counts.encode()]:
        raise ValueError
    return counts.encode()
