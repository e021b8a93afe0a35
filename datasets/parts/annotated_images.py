"""Base of data sets of images with boxes.

Holds packed annotations, checks that name the file, decoding, and a cache for small images.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from samewise.datasets.parts.contents import add_files, spaced_indices
from samewise.datasets.parts.decode import decode_file, image_preparation, read_file
from samewise.datasets.parts.masks import IGNORED, decode
from samewise.datasets.parts.names import require_listed
from samewise.datasets.parts.upright import orientation
from samewise.runner.errors import ConfigError, DataError, Problem

Cache = Literal["none", "memory"]
EmptyBoxes = Literal["refuse", "drop"]
Masks = Literal["none", "objects", "classes"]
_HEADERS = 1000
"""Number of files whose EXIF orientation is looked up at the start."""


@dataclass
class Annotated:
    """Annotation of one image.

    Args:
        name: The image file's name, relative to the folder of images.
        width: Width in pixels, as the annotation says.
        height: Height in pixels, as the annotation says.
        number: The image's number in the annotations.
        boxes: [x1, y1, x2, y2] in pixels; the right and lower edges are excluded.
        labels: A label for each box, from 1; 0 is the background.
        crowd: For each box, whether it stands for a group of objects.
        areas: An area for each box, in square pixels: the object mask's where there is a mask.
        masks: The run lengths of each object's mask (`parts.masks`), if masks are read.
    """

    name: str
    width: int
    height: int
    number: int
    boxes: list[list[float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    crowd: list[bool] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)

    def add(
        self,
        box: list[float],
        label: int,
        *,
        crowd: bool = False,
        area: float | None = None,
        mask: bytes = b"",
        where: str = "",
        empty: EmptyBoxes = "refuse",
        slack: float = 0.0,
        hint: str = "correct the annotation",
    ) -> None:
        """Add one object, whose box is cut at the image's border.

        Args:
            box: [x1, y1, x2, y2] in pixels.
            label: Its class.
            crowd: Whether it stands for a group of objects.
            area: The area of its mask; None: the box's own.
            mask: The run lengths of its mask.
            where: The annotation's place, for messages.
            empty: "drop" leaves out a box without area; "refuse" raises an error.
            slack: Pixels by which a box may reach beyond the image.
            hint: The hint for a box that reaches further.

        Raises:
            DataError: The box is not finite, is inverted, reaches too far beyond the image, or has
                no area.
        """
        x1, y1, x2, y2 = box
        sides = f"x {x1:g} to {x2:g}, y {y1:g} to {y2:g}"
        expected = f"x from 0 to {self.width} and y from 0 to {self.height}, in pixels"
        if not all(np.isfinite(box)):
            raise DataError(
                Problem(where, "a box has numbers that are not finite", sides, expected)
            )
        if x2 < x1 or y2 < y1:
            raise DataError(
                Problem(
                    where,
                    "a box is inverted: its right or lower edge comes before the opposite edge",
                    sides,
                    expected,
                    "correct the annotation",
                )
            )
        if min(x1, y1) < -slack or x2 > self.width + slack or y2 > self.height + slack:
            raise DataError(
                Problem(
                    where,
                    "a box has a negative corner"
                    if min(x1, y1) < -slack
                    else f"a box extends beyond the image of {self.width} x {self.height} pixels",
                    sides,
                    expected,
                    hint,
                )
            )
        x1, y1 = max(x1, 0.0), max(y1, 0.0)
        x2, y2 = min(x2, float(self.width)), min(y2, float(self.height))
        if x1 >= x2 or y1 >= y2:
            if empty == "drop":
                return
            raise DataError(
                Problem(
                    where,
                    "a box has no area",
                    sides,
                    expected,
                    "correct the annotation, or set dataset.empty_boxes=drop",
                )
            )
        self.boxes.append([x1, y1, x2, y2])
        self.labels.append(label)
        self.crowd.append(crowd)
        self.areas.append((x2 - x1) * (y2 - y1) if area is None else area)
        self.masks.append(mask)


class AnnotatedImages(Dataset[dict[str, Any]]):
    """Samples of an image and its boxes, in the form of torchvision's v2 transforms.

    A subclass lists the files; or overrides `require_files`, `file`, `add_contents` and `path` for
    images that are elsewhere.

    A sample is `{"image": tv_tensors.Image uint8[3, H, W], "boxes": tv_tensors.BoundingBoxes
    float32[N, 4] (x1, y1, x2, y2), "labels": int64[N], "image_id": int}`. In evaluation
    (`training=False`) it also has `"crowd": bool[N]`, `"area": float32[N]` in square pixels of the
    file, however the image is resized, `"file_size"`, the file's (height, width), and `"probe"`, by
    which `require_whole` detects what transforms did. With masks of objects it has `"masks":
    tv_tensors.Mask uint8[N, H, W]`; with masks of classes it is as `class_map_sample` returns it.

    Args:
        folder: The folder of the images.
        images: The images' annotations.
        classes: The labels' names; the first is the background.
        training: Leave out crowds and images without a box, as torchvision's references do.
        size: [height, width] in pixels, to which images and boxes are resized as they are read;
            None keeps their size.
        cache: "memory" decodes all images once, at the start, and keeps them: set `size`, or have
            much memory.
        masks: "objects": a mask for each box. "classes": a map of labels instead of boxes.

    Raises:
        DataError: An image file is missing; or, with cache="memory", it is damaged or its size
            differs from its annotation.
        ConfigError: `size` is not a valid size.
    """

    def __init__(
        self,
        folder: Path,
        images: Sequence[Annotated],
        *,
        classes: Sequence[str],
        training: bool,
        size: Sequence[int] | None = None,
        cache: Cache = "none",
        masks: Masks = "none",
    ) -> None:
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise ConfigError(
                Problem(
                    "dataset.size",
                    "is not a valid size",
                    list(size),
                    "[height, width] in pixels, or null",
                )
            )
        chosen = [
            image for image in images if not training or any(not crowd for crowd in image.crowd)
        ]
        names = [image.name for image in chosen]
        self.require_files(folder, names)
        self.classes = list(classes)
        self._folder, self._training = folder, training
        self._size = None if size is None else (int(size[0]), int(size[1]))
        # Packed arrays instead of a million objects: a worker that only reads those would copy them
        # all, reference count by reference count.
        self._names = np.array([os.fsencode(name) for name in names])
        self._sizes = torch.tensor(
            [[image.height, image.width] for image in chosen], dtype=torch.int64
        ).view(-1, 2)
        self._numbers = torch.tensor([image.number for image in chosen], dtype=torch.int64)
        self._offsets = torch.tensor([0, *(len(image.boxes) for image in chosen)]).cumsum(0)
        self._boxes = torch.tensor(
            [box for image in chosen for box in image.boxes], dtype=torch.float32
        ).view(-1, 4)
        self._labels = torch.tensor(
            [label for image in chosen for label in image.labels], dtype=torch.int64
        )
        self._crowd = torch.tensor(
            [crowd for image in chosen for crowd in image.crowd], dtype=torch.bool
        )
        self._areas = torch.tensor(
            [area for image in chosen for area in image.areas], dtype=torch.float32
        )
        self._masks = masks
        encoded = [mask for image in chosen for mask in image.masks]
        self._mask_ends = torch.tensor([0, *map(len, encoded)]).cumsum(0)
        self._mask_bytes = np.frombuffer(b"".join(encoded), np.uint8)
        # Shares of the image are a common format. Boxes of whole numbers up to 1 may be tiny ones
        # in pixels.
        if len(self._boxes) and self._boxes.max() <= 1 and bool(self._boxes.frac().any()):
            raise DataError(
                Problem(
                    str(folder),
                    "the boxes are shares of the images",
                    self._boxes[0].tolist(),
                    "boxes in pixels",
                    "multiply them by width and height",
                )
            )
        self._cached = self._read_all() if cache == "memory" else None

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self._read(index) if self._cached is None else self._cached[index]
        place = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        height, width = image.shape[-2:]
        scale_y, scale_x = height / int(self._sizes[index, 0]), width / int(self._sizes[index, 1])
        boxes = self._boxes[place] * torch.tensor([scale_x, scale_y, scale_x, scale_y])
        # A batch shares no memory with the data set
        crowd, labels = self._crowd[place], self._labels[place].clone()
        masks = None if self._masks == "none" else self._decode(index, (height, width))
        if self._masks == "classes" and masks is not None:
            return class_map_sample(image, masks, labels, number=int(self._numbers[index]))
        if self._training:
            boxes, labels = boxes[~crowd], labels[~crowd]
            masks = None if masks is None else masks[~crowd]
        sample = annotated_sample(
            image, boxes, labels, number=int(self._numbers[index]), masks=masks
        )
        if not self._training:
            sample |= {
                "crowd": crowd.clone(),
                "area": self._areas[place].clone(),
                **size_before(image, tuple(self._sizes[index].tolist())),
            }
        return sample

    def path(self, index: int) -> Path:
        """Return the image file of a sample."""
        return self._folder / os.fsdecode(self._names[index])

    def fields(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return a sample's key, and its fields as a shard has them.

        Raises:
            DataError: There are masks.
        """
        where, file = str(self.path(index)), self.file(index)
        DataError.raise_if(self._masks != "none", where, "has masks, which are not converted")
        place = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        columns = (self._boxes, self._labels, self._crowd, self._areas)
        objects = [
            {
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "category": self.classes[label],
                "iscrowd": int(crowd),
                "area": area,
            }
            for (x1, y1, x2, y2), label, crowd, area in zip(
                *(column[place].tolist() for column in columns), strict=True
            )
        ]
        return os.fsdecode(self._names[index]), {
            "image": file if isinstance(file, bytes) else read_file(file),
            "objects": objects,
        }

    def file(self, index: int) -> Path | bytes:
        """Return the image file of a sample, or its content."""
        return self.path(index)

    def orientation(self, index: int) -> int:
        """Return the EXIF orientation of a sample's image, 1 to 8."""
        return orientation(self.path(index))

    def require_files(self, folder: Path, names: Sequence[str]) -> None:
        """Raise a DataError unless all images exist."""
        require_listed(folder, names, listed_in="the annotations")

    def add_contents(self, digest: blake2b) -> None:
        """Update a hash with the sizes and contents of the images."""
        add_files(digest, self.path, len(self), most=len(self))

    @property
    def preparation(self) -> dict[str, Any]:
        """How a file becomes an image, for programs that prepare images elsewhere."""
        return image_preparation("rgb", size=self._size)

    def aspect_ratios(self) -> Tensor:
        """Return float64[N]: width / height of each image, as its annotation says."""
        return self._sizes[:, 1].double() / self._sizes[:, 0].double()

    @property
    def turned(self) -> list[str]:
        """Files with an EXIF orientation that exchanges no sides: boxes may or may not follow it.

        Up to 1,000 files are looked at, evenly spaced.
        """
        square = self._sizes[:, 0] == self._sizes[:, 1]
        return [
            os.fsdecode(self._names[index])
            for index in spaced_indices(len(self), _HEADERS)
            if 1 < self.orientation(index) < (9 if square[index] else 5)
        ]

    def fingerprint(self) -> str:
        """Return 32 hex digits that identify the samples.

        They cover the classes, names, annotations and sizes of all files, and the bytes of 64
        files.
        """
        digest = blake2b(repr((self.classes, self._training, self._size)).encode(), digest_size=16)
        digest.update(b"\0".join(self._names.tolist()))
        for packed in (
            self._sizes,
            self._numbers,
            self._offsets,
            self._boxes,
            self._labels,
            self._crowd,
            self._areas,
        ):
            digest.update(packed.contiguous().view(-1).numpy())
        if self._masks != "none":
            digest.update(self._masks.encode())
            digest.update(self._mask_ends.numpy())
            digest.update(self._mask_bytes)
        self.add_contents(digest)
        return digest.hexdigest()

    def _decode(self, index: int, size: tuple[int, int]) -> Tensor:
        """Return the masks of an image's objects, uint8[N, height, width] of this size."""
        ends = self._mask_ends[int(self._offsets[index]) : int(self._offsets[index + 1]) + 1]
        parts = np.split(self._mask_bytes[ends[0] : ends[-1]], (ends[1:-1] - ends[0]).numpy())
        masks = decode(
            [part.tobytes() for part in parts[: len(ends) - 1]], *self._sizes[index].tolist()
        )
        return functional.resize_mask(masks, list(size))

    def _read(self, index: int) -> Tensor:
        file, where = self.file(index), str(self._folder / os.fsdecode(self._names[index]))
        image = decode_file(file if isinstance(file, bytes) else read_file(file), where)
        height, width = self._sizes[index].tolist()
        if image.shape[-2:] != (height, width):
            turned = image.shape[-2:] == (width, height) and self.orientation(index) != 1
            raise DataError(
                Problem(
                    where,
                    f"is {image.shape[-1]} x {image.shape[-2]} pixels, but its annotation "
                    f"says {width} x {height}",
                    hint="it has an EXIF orientation, which is not applied: turn its pixels "
                    "(exiftran, mogrify -auto-orient)"
                    if turned
                    else "one of the two is wrong",
                )
            )
        return (
            image
            if self._size is None
            else functional.resize(image, list(self._size), antialias=True)
        )

    def _read_all(self) -> list[Tensor]:
        """Decode all images."""
        # The decoders release Python's global lock: a thread for each core keeps all cores busy.
        # After an error, `map` cancels what is not begun.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(self._read, range(len(self))))


def annotated_sample(
    image: Tensor, boxes: Tensor, labels: Tensor, *, number: int, masks: Tensor | None = None
) -> dict[str, Any]:
    """Return a sample of `AnnotatedImages` from uint8[3, H, W], float32[N, 4] and int64[N].

    Masks, if there are any, are uint8[N, H, W].
    """
    height, width = image.shape[-2:]
    return {
        "image": tv_tensors.Image(image),
        "boxes": tv_tensors.BoundingBoxes(
            boxes, format=tv_tensors.BoundingBoxFormat.XYXY, canvas_size=(height, width)
        ),  # pyright: ignore[reportCallIssue]
        "labels": labels,
        "image_id": number,
        **({} if masks is None else {"masks": tv_tensors.Mask(masks)}),
    }


def class_map_sample(
    image: Tensor, masks: Tensor, labels: Tensor, *, number: int
) -> dict[str, Any]:
    """Return `image`, `mask` uint8[H, W] and `image_id` from uint8[3, H, W] and N objects' masks.

    The mask has each pixel's label, 0 outside all objects. As in torchvision's
    references/segmentation, pixels of several objects do not count.
    """
    zeros = torch.zeros(1, *image.shape[-2:], dtype=torch.uint8)
    class_map = torch.cat([zeros, masks * labels.to(torch.uint8)[:, None, None]]).amax(0)
    class_map[masks.sum(0) > 1] = IGNORED
    return {
        "image": tv_tensors.Image(image),
        "mask": tv_tensors.Mask(class_map),
        "image_id": number,
    }


_PROBE = torch.tensor([0.25, 0.3, 0.5, 0.6])
"""Box in shares of an image's width and height: inside the image, on no axis of symmetry."""


def size_before(image: Tensor, size: tuple[int, int]) -> dict[str, Any]:
    """Return a sample's entries for evaluation: the file's size, and a probe box.

    torchvision's transforms move the probe with the image, so that `require_whole` can compare
    them.
    """
    height, width = image.shape[-2:]
    probe = _PROBE * torch.tensor([width, height] * 2)
    return {
        "file_size": size,
        "probe": tv_tensors.BoundingBoxes(
            probe[None], format=tv_tensors.BoundingBoxFormat.XYXY, canvas_size=(height, width)
        ),
    }  # pyright: ignore[reportCallIssue]


def require_whole(image: Tensor, probe: Tensor) -> None:
    """Raise a ConfigError if the transforms did more than resize the image.

    Boxes that are detected in such an image cannot be converted to pixels of the file.
    """
    height, width = image.shape[-2:]
    # Half a pixel is left for rounding
    ConfigError.raise_if(
        not torch.allclose(
            probe[0].as_subclass(Tensor),
            _PROBE * torch.tensor([width, height] * 2),
            rtol=0.0,
            atol=0.5,
        ),
        "transforms.eval.sample",
        "crop, pad, flip or turn images in evaluation, so boxes could not be given in "
        "pixels of the file",
        expected="transforms that resize images, or change their colours",
    )
