"""Clips from videos in folders by class: `ROOT/SPLIT/CLASS/*.mp4`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
from samewise.runner.errors import DataError, Problem, require_at_least

Where = Literal["random", "centre"]

_BLOCK = 1 << 16

_FIRST = 2_000
"""Files whose format is checked before training."""


@final
class VideoClips(Dataset[dict[str, Any]]):
    """Samples `{"image": uint8[T, 3, H, W], "label": int}`, one clip per video.

    Labels number the class folders in sorted order.

    Args:
        root: The folder with the splits' folders in it.
        folder: This split's folder in it; "" for the root itself.
        classes_from: The split's folder that names the classes, as in ImageFolder; None: this one.
        classes: The folders' names in the order of the labels, as in ImageFolder; None: by
            `classes_from`.
        num_classes: How many classes there should be; None: as many as there are.
        frames: T, the number of frames of a clip.
        stride: Frames of the video from one of the clip to the next. A video that is too short for
            it repeats its last frame.
        clip: "random": begins anywhere, by the sample's stream, so that each epoch sees another;
            "centre": the middle.
        transform: Applied to each clip, in the worker: any transform of torchvision.transforms.v2,
            which treats all frames alike.

    Raises: DataError: a folder is missing or empty, or its classes are not those expected; or in
        one of up to 2,000 files, evenly
            spaced, frames cannot be found exactly.
        ConfigError: torchcodec or FFmpeg is not there.
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
        clip: Where = "random",
        transform: Callable[[Tensor], Any] | None = None,
    ) -> None:
        require_at_least({"dataset.frames": frames, "dataset.stride": stride})
        require_torchcodec()  # now, not in the first worker
        base = Path(root).expanduser().absolute()
        self._folder = base / folder
        self.classes = find_classes(
            base,
            folder,
            classes_from=classes_from,
            classes=classes,
            num_classes=num_classes,
            of="videos",
        )
        found, self.left_out = list_by_class(self._folder, self.classes, endings=VIDEOS)
        if not found:
            expected = f"folders by class with videos ({', '.join(VIDEOS)})"
            raise DataError(
                Problem(
                    str(self._folder),
                    "has no videos",
                    expected=expected,
                    hint="set dataset.root=FOLDER",
                )
            )
        self._names = np.array([os.fsencode(name) for name in found])
        self._labels = list(found.values())
        for index in spaced_indices(len(self._names), _FIRST):
            require_exact(self.path(index))
        self._length, self._stride, self._clip, self._transform = frames, stride, clip, transform

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        clip = read_frames(self.path(index), self._choose_frames)
        return {
            "image": clip if self._transform is None else self._transform(clip),
            "label": self._labels[index],
        }

    def path(self, index: int) -> Path:
        """The file of a sample."""
        return self._folder / os.fsdecode(self._names[index])

    def fingerprint(self) -> str:
        """32 hex digits of the decoder, classes, names, labels, sizes of the files (of up to
        100,000), and the first and last 64 KiB of 64.
        """
        digest = blake2b(repr((versions(), self.classes, self._labels)).encode(), digest_size=16)
        digest.update(b"\0".join(self._names.tolist()))
        add_sizes(digest, self.path, len(self))
        for index in spaced_indices(len(self), CONTENTS):
            require_regular(self.path(index), whole=False)
            with open(self.path(index), "rb") as file:
                digest.update(file.read(_BLOCK))
                file.seek(-min(_BLOCK, file.seek(0, os.SEEK_END)), os.SEEK_END)
                digest.update(file.read())
        return digest.hexdigest()

    def _choose_frames(self, available: int) -> list[int]:
        """The numbers of the clip's frames in a video with so many."""
        start = centre if self._clip == "centre" else _anywhere
        return clip_frames(available, frames=self._length, stride=self._stride, start=start)


def _anywhere(spare: int) -> int:
    return int(torch.randint(spare + 1, ()))
