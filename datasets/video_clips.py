"""Clips from videos in folders by class: `ROOT/SPLIT/CLASS/*.mp4`."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from samewise.datasets.parts.contents import CONTENTS, add_sizes, spaced_indices
from samewise.datasets.parts.folders import VIDEOS, find_classes, list_by_class
from samewise.datasets.parts.limits import require_regular
from samewise.datasets.parts.video_files import (
    centre,
    clip_frames,
    read_frames,
    require_exact,
    require_torchcodec,
    versions,
)
from samewise.runner.errors import DataError, require_at_least

_BLOCK = 1 << 16

_FIRST = 2_000
"""Number of files whose format is checked before training."""


@final
class VideoClips(Dataset[dict[str, Any]]):
    """Samples `{"image": uint8[T, 3, H, W], "label": int}`, one clip of each video.

    Labels number the class folders in sorted order.

    Args:
        root: The folder of the splits' folders.
        folder: This split's folder in it; "" for the root itself.
        classes_from: The folder that names the classes, usually the training split's; None: this
            split's.
        classes: The class folders' names in the order of the labels; some may be missing. None: by
            `classes_from`.
        num_classes: The expected number of classes; None allows any number.
        frames: T, the number of frames in a clip.
        stride: Distance between a clip's frames in the video. A video that is too short repeats its
            last frame.
        clip: "random": the sample's own stream draws where the clip begins, anew in each epoch.
            "centre": the middle of the video.
        transform: Applied to each clip, in the worker: any transform of torchvision.transforms.v2,
            which treats all frames alike.

    Raises:
        DataError: A folder is missing or empty, its classes are not the expected ones, or frames
            cannot be found exactly in one of up to 2,000 files, evenly spaced.
        ConfigError: torchcodec or FFmpeg is missing.
    """

    def __init__(
        self,
        *,
        root: str,
        folder: str,
        classes_from: str | None = None,
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        frames: int = 16,
        stride: int = 1,
        clip: Literal["random", "centre"] = "random",
        transform: Callable[[Tensor], Any] | None = None,
    ) -> None:
        require_at_least({"dataset.frames": frames, "dataset.stride": stride})
        # An error is due here, not in the first worker
        require_torchcodec()
        base = Path(root).expanduser()
        self._folder = base / folder
        self.classes = find_classes(
            base,
            folder,
            classes_from=classes_from,
            classes=classes,
            num_classes=num_classes,
            content="videos",
        )
        label_of_file, self.left_out = list_by_class(self._folder, self.classes, endings=VIDEOS)
        DataError.raise_if(
            not label_of_file,
            str(self._folder),
            "has no videos",
            expected=f"folders by class with videos ({', '.join(VIDEOS)})",
        )
        self._names = np.array([os.fsencode(name) for name in label_of_file])
        self.labels = list(label_of_file.values())
        for index in spaced_indices(len(self._names), _FIRST):
            require_exact(self.path(index))
        self._choose_frames = partial(
            clip_frames,
            frames=frames,
            stride=stride,
            start=centre if clip == "centre" else _anywhere,
        )
        self._transform = transform

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        clip = read_frames(self.path(index), self._choose_frames)
        return {
            "image": clip if self._transform is None else self._transform(clip),
            "label": self.labels[index],
        }

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self._folder / os.fsdecode(self._names[index])

    def fingerprint(self) -> str:
        """Return 32 hex digits that identify the samples and their decoder.

        They cover the decoder, classes, names, labels, the sizes of up to 100,000 files, and the
        first and last 64 KiB of 64.
        """
        digest = blake2b(repr((versions(), self.classes, self.labels)).encode(), digest_size=16)
        digest.update(b"\0".join(self._names.tolist()))
        add_sizes(digest, self.path, len(self))
        for index in spaced_indices(len(self), CONTENTS):
            require_regular(self.path(index), into_memory=False)
            # Hashing whole videos would take too long
            with open(self.path(index), "rb") as file:
                digest.update(file.read(_BLOCK))
                file.seek(-min(_BLOCK, file.seek(0, os.SEEK_END)), os.SEEK_END)
                digest.update(file.read())
        return digest.hexdigest()


def _anywhere(spare: int) -> int:
    return int(torch.randint(spare + 1, ()))
