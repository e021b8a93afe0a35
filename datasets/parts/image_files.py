"""Base of data sets of image files: packed lists of files, decoding, a cache for small images."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from samewise.datasets.parts.channels import read_channels, read_tensor
from samewise.datasets.parts.contents import add_files
from samewise.datasets.parts.decode import image_preparation, read_file, read_image
from samewise.datasets.parts.encoded import EncodedImages
from samewise.datasets.parts.in_memory import Transform
from samewise.runner.errors import ConfigError, DataError, Problem
from samewise.runner.interfaces import Batch

Cache = Literal["none", "memory"]
ImageMode = Literal["rgb", "gray", "channels", "tensors"]
DecodedBy = Literal["worker", "device"]

_BLOCK = 256


class ImageFiles(Dataset[dict[str, Any]]):
    """Samples `{"image": uint8[C, H, W], "label": int or float32[T]}` decoded from files.

    A subclass lists the files.

    Args:
        folder: The folder that the names are relative to.
        names: File names, with "/" between folders.
        labels: A label for each file; or numbers for each, float32[N, T], to learn by regression.
        classes: The names of the labels, or of the T numbers.
        mode: "rgb" (C is 3), "gray" (C is 1) or "channels": `channels` as they are stored
            (`parts.channels`), which may be float32. "tensors": arrays (.npy) and tensors (.pt) of
            any shape in place of images.
        channels: C, with mode="channels".
        cache: "memory" decodes all images once, at the start, into one tensor; they must have the
            same size.
        decode: "worker" decodes each image when it is requested. "device" returns `EncodedImages`
            of one image, which the batch transform `Decode` decodes on the model's device: on CUDA
            by nvJPEG, whose pixels differ.
        transform: Applied to each image, in the worker.
        left_out: Description of files that were left out, for a warning; empty if there are none.

    Raises:
        ConfigError: decode="device" is combined with a setting that needs pixels (a cache, a
            transform, a mode without colours), or `channels` is missing.
        DataError: With cache="memory", a file is damaged or its image has another size.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        labels: Sequence[int] | Tensor,
        *,
        classes: Sequence[str],
        mode: ImageMode = "rgb",
        channels: int | None = None,
        cache: Cache = "none",
        decode: DecodedBy = "worker",
        transform: Transform | None = None,
        left_out: str = "",
    ) -> None:
        self.encoded = decode == "device"
        # The first setting that needs decoded images
        needs = (
            f"mode: {mode}"
            if mode not in ("rgb", "gray")
            else "cache: memory"
            if cache == "memory"
            else "a transform of each image"
            if transform
            else ""
        )
        ConfigError.raise_if(
            self.encoded and needs, "decode", f"cannot be combined with {needs}", decode, "worker"
        )
        ConfigError.raise_if(
            mode == "channels" and (channels is None or channels < 1),
            "channels",
            "is not a valid number of channels",
            channels,
            "a whole number from 1, with mode: channels",
        )
        self.classes, self.left_out = list(classes), left_out
        self._folder = folder
        # One array instead of a million strings: a worker that only reads them would otherwise copy
        # them all, reference count by reference count.
        self._names = np.array([os.fsencode(name) for name in names])
        if isinstance(labels, Tensor):
            self.labels, self.columns, unused = labels, {"label": labels}, set[int]()
        else:
            self.labels, self.columns = torch.tensor(labels, dtype=torch.int64), {}
            unused = set(range(len(self.classes))) - set(labels)
        self.unused_classes = [self.classes[label] for label in sorted(unused)]
        self._mode: ImageMode = mode
        self._channels = channels or 0
        self._transform = transform
        self._cached = self._read_all() if cache == "memory" else None

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.encoded:
            path = self.path(index)
            return {
                "image": EncodedImages.from_file(read_file(path), str(path), mode=self._mode),
                "label": self._label(index),
            }
        image = self._read(index) if self._cached is None else self._cached[index]
        return {
            "image": image if self._transform is None else self._transform(image),
            "label": self._label(index),
        }

    def _label(self, index: int) -> int | Tensor:
        return self.labels[index] if self.columns else int(self.labels[index])

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self._folder / os.fsdecode(self._names[index])

    def fields(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return a sample's key, and its fields as a shard has them."""
        label = self.labels[index].tolist()
        return os.fsdecode(self._names[index]), {
            "image": read_file(self.path(index)),
            "label": label if self.columns else self.classes[label],
        }

    @property
    def preparation(self) -> dict[str, Any]:
        """How a file becomes an image, for programs that prepare images elsewhere."""
        return image_preparation(self._mode, channels=self._channels)

    @property
    def batch(self) -> Callable[[Sequence[int]], Batch] | None:
        """Function that fetches many samples at once, collated.

        None unless all images are in memory and need no transform.
        """
        return self._fetch if self._cached is not None and self._transform is None else None

    def _fetch(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices)
        return {"image": self._cached[chosen], "label": self.labels[chosen]}

    def fingerprint(self) -> str:
        """Return 32 hex digits that identify the samples.

        They cover classes, names, labels, the sizes of up to 100,000 files, evenly spaced, and the
        bytes of 64.
        """
        digest = blake2b(
            repr(
                (self.classes, self._mode, *([self._channels] if self._mode == "channels" else []))
            ).encode(),
            digest_size=16,
        )
        digest.update(b"\0".join(self._names.tolist()))
        digest.update(self.labels.numpy())
        add_files(digest, self.path, len(self))
        return digest.hexdigest()

    def _read(self, index: int) -> Tensor:
        if self._mode == "tensors":
            return read_tensor(self.path(index))
        return (
            read_channels(self.path(index), self._channels)
            if self._mode == "channels"
            else read_image(self.path(index), mode=self._mode)
        )

    def _read_all(self) -> Tensor:
        """Decode all images to [N, C, H, W] in the first image's type."""
        first_image = self._read(0)
        images = torch.empty((len(self), *first_image.shape), dtype=first_image.dtype)

        def read(start: int) -> None:
            for index in range(start, min(start + _BLOCK, len(self))):
                image = self._read(index)
                if (image.shape, image.dtype) != (first_image.shape, first_image.dtype):
                    raise DataError(
                        Problem(
                            str(self.path(index)),
                            "images cached in memory must have the same size and type",
                            f"{image.dtype}{list(image.shape)}",
                            f"{first_image.dtype}{list(first_image.shape)}, as the first image",
                            "set dataset.cache=none",
                        )
                    )
                images[index] = image

        # The decoders release Python's global lock: a thread for each core keeps all cores busy.
        # After an error, `map` cancels what is not begun.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(read, range(0, len(self), _BLOCK)))
        return images
