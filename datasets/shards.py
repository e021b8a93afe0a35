"""Images and recordings in shards: files with many samples each."""

import os
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from samewise.datasets.parts.classes import require_count, require_known, sort_classes
from samewise.datasets.parts.decode import Mode
from samewise.datasets.parts.encoded_samples import EncodedSamples, ImageSamples, RecordingSamples
from samewise.datasets.parts.folders import IMAGES, SOUNDS
from samewise.datasets.parts.image_files import DecodedBy
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.keyed_split import in_split
from samewise.runner.errors import ConfigError, DataError, Problem
from samewise.runner.shards.index import open_index, split_folders
from samewise.runner.shards.reader import KEY


class _Shards(EncodedSamples):
    """Samples of a split, in the order of the shards' names, then as in the shard.

    The shards lie in `train`, `valid` and `test` below ROOT; there may be no `test`. If ROOT has no
    `train`, it has the shards itself, and a hash of each sample's key decides its split.

    Args:
        root: The folder.
        split: "train", "valid" or "test".
        content: The setting and the name of the column of images or recordings. In tar files it is
            a member's ending; if a sample has no such member, that with one of `endings`.
        endings: Endings of members with images or recordings.
        label: The column, the ending of a member, or the field of the JSON in `.json` with the
            label; else `.cls` has it.
        shares: Shares of `valid` and `test`, parts of 1, by hash.
        key: The hash's key: another key splits differently.
        classes: Class names in the order of their numbers, by name or by number in the shards;
            None: all labels that occur, sorted.
        num_classes: The expected number of classes; None allows any number.
        window: Shards, or row groups of tables, whose samples are mixed in training. So many row
            groups are in memory.

    Raises:
        DataError: There are no shards, one is damaged or has changed since it was indexed, or a
            sample has no label or another class.
        ConfigError: The shares are not valid, or pyarrow is not installed.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        content: tuple[str, str],
        endings: Collection[str],
        label: str = "label",
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        window: int = 16,
    ) -> None:
        base = os.path.expanduser(root).rstrip("/")
        folders = split_folders(base)
        # There may be no test split
        splits = folders | ({split: f"{base}/{split}"} if folders and split != "test" else {})
        indexes = {x: open_index(y, label) for x, y in (splits or {split: base}).items()}
        (self._setting, self._column), self._endings, self.window = content, endings, window
        self._index = indexes.get(split) or indexes["train"]
        # None: all samples
        self._places: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if not folders:
            hashes = (f"{number:016x}" for number in self._index.samples["key"])
            chosen = in_split(hashes, split, shares, key=key, where=root)
            self._places = np.flatnonzero(chosen)
        elif split not in folders:
            self._places = np.arange(0)
        labels = sorted({x for index in indexes.values() for x in index.labels})
        self.classes = list(map(str, classes)) if classes is not None else sort_classes(labels)
        number_of = {str(number): number for number in range(len(classes or ()))}
        number_of |= {name: number for number, name in enumerate(self.classes)}
        unknown = (("a sample", x) for x in labels if x not in number_of)
        require_known(root, unknown, self.classes)
        require_count(root, self.classes, num_classes)
        self._numbers = np.array([number_of[x] for x in self._index.labels], dtype=np.int64)
        self.unused_classes = [
            name for number, name in enumerate(self.classes) if number not in self._numbers
        ]

    def __len__(self) -> int:
        return len(self._index.samples) if self._places is None else len(self._places)

    def _place(self, index: int) -> int:
        return index if self._places is None else int(self._places[index])

    def content(self, index: int) -> tuple[bytes, str, str]:
        shard, fields = self._index.read(self._place(index), [self._column], units=self.window)
        name = self._column
        if name not in fields:
            name = next((x for x in fields if f".{x}" in self._endings), "")
        if not isinstance(content := fields.get(name), bytes):
            raise DataError(
                Problem(
                    f"{shard}, {fields[KEY]}",
                    f"has no {self._setting}",
                    sorted(fields.keys() - {KEY}),
                    hint=f"dataset.{self._setting}=NAME names the column, or the member's ending",
                )
            )
        sample = fields[KEY]
        return content, shard, f"{sample}.{name}" if f".{name}" in self._endings else str(sample)

    def label(self, index: int) -> int:
        return int(self._numbers[self._index.samples["label"][self._place(index)]])

    def path(self, index: int) -> Path:
        """Return the shard of a sample."""
        return Path(self._index.shard_path(self._place(index)))

    @property
    def labels(self) -> Tensor:
        """Labels int64[N] of all samples."""
        rows = self._index.samples["label"]
        return torch.from_numpy(self._numbers[rows if self._places is None else rows[self._places]])

    @property
    def shard_sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Numbers int64[U] of samples of each shard or row group, for the order of samples."""
        ends = self._index.unit_ends
        return np.diff(
            ends if self._places is None else np.searchsorted(self._places, ends), prepend=0
        )

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover the shards' content, the classes and the split.

        They do not depend on where the data are.
        """
        shards = [(shard.digest, shard.units) for shard in self._index.shards]
        numbers = self._numbers.tolist()
        digest = blake2b(
            repr((shards, self._index.labels, numbers, self.classes, self._column)).encode(),
            digest_size=16,
        )
        if self._places is not None:
            digest.update(self._places)
        return digest.hexdigest()


@final
class ShardImages(ImageSamples, _Shards):
    """Samples `{"image": uint8[C, H, W], "label": int}` of images in shards.

    Args:
        image: The column of the images, or a member's ending, as `content` in `_Shards`.
        mode: "rgb" (C is 3) or "gray" (C is 1).
        upright: Turn images by their EXIF orientation.
        decode: "worker", or "device", as in `ImageFiles`.
        transform: Applied to each image, in the worker.
        root, split, label, shares, key, classes, num_classes, window: As in `_Shards`.

    Raises:
        DataError: As in `_Shards`; or an image is damaged.
        ConfigError: As in `_Shards`; or decode="device" is combined with a setting that needs
            pixels.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        image: str = "image",
        mode: Mode = "rgb",
        upright: bool = False,
        decode: DecodedBy = "worker",
        transform: Transform | None = None,
        label: str = "label",
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        window: int = 16,
    ) -> None:
        self.mode, self.upright, self.transform = mode, upright, transform
        self.encoded = decode == "device"
        if self.encoded and (upright or transform):
            reason = "cannot be combined with dataset.upright or a transform of each image"
            raise ConfigError(Problem("decode", reason, decode, "worker"))
        super().__init__(
            root=root,
            split=split,
            content=("image", image),
            endings=IMAGES,
            label=label,
            shares=shares,
            key=key,
            classes=classes,
            num_classes=num_classes,
            window=window,
        )


@final
class ShardRecordings(RecordingSamples, _Shards):
    """Samples `{"waveform": float32[T], "length": int, "label": int, "name": str}` in shards.

    All samples have length T; `length` excludes the silence at the end.

    Args:
        audio: The column of the recordings, or a member's ending, as `content` in `_Shards`.
        seconds: Length of a sample in seconds. A longer recording is cut: in training to a section
            that the sample's own stream draws, else to the middle.
        sample_rate: The waveforms' rate in Hz; recordings at another rate are resampled.
        root, split, label, shares, key, classes, num_classes, window: As in `_Shards`.

    Raises:
        DataError: As in `_Shards`; or a recording is damaged.
        ConfigError: As in `_Shards`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        audio: str = "audio",
        seconds: float,
        sample_rate: int,
        label: str = "label",
        shares: Mapping[str, float],
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        window: int = 16,
    ) -> None:
        self.sample_rate, self.frames, self.is_training = (
            sample_rate,
            max(1, round(seconds * sample_rate)),
            split == "train",
        )
        super().__init__(
            root=root,
            split=split,
            content=("audio", audio),
            endings=SOUNDS,
            label=label,
            shares=shares,
            key=key,
            classes=classes,
            num_classes=num_classes,
            window=window,
        )
