"""Images, recordings and texts in shards, each with a class."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor

from samewise.datasets.parts.classes import number_classes, require_count
from samewise.datasets.parts.decode import Mode
from samewise.datasets.parts.encoded_samples import EncodedSamples, ImageSamples, RecordingSamples
from samewise.datasets.parts.folders import IMAGES, SOUNDS
from samewise.datasets.parts.image_files import DecodedBy
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.lists import text_of
from samewise.datasets.parts.shard_samples import ShardSamples
from samewise.datasets.parts.tokens import TEXTS, Tokenizer
from samewise.runner.errors import ConfigError, DataError, Problem
from samewise.runner.shards.index import plan_of


class _Shards(ShardSamples, EncodedSamples):
    """Samples of `ShardSamples`, each with a class.

    Args:
        root, split, content, endings, label, shares, key, window: As in `ShardSamples`.
        classes: Class names in the order of their numbers, by name or by number in the shards;
            None: those of the data that were converted, else all labels that occur, sorted.
        num_classes: The expected number of classes; None allows any number.

    Raises:
        DataError: As in `ShardSamples`; or a sample has another class.
        ConfigError: As in `ShardSamples`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        content: tuple[str, str],
        endings: Collection[str],
        label: str = "label",
        shares: Mapping[str, float] | None = None,
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        window: int = 16,
    ) -> None:
        super().__init__(
            root,
            split,
            content=content,
            endings=endings,
            label=label,
            shares=shares,
            key=key,
            window=window,
        )
        classes = plan_of(root).get("classes") or None if classes is None else classes
        self.classes, number_of = number_classes(root, self.all_labels, classes)
        require_count(root, self.classes, num_classes)
        self._numbers = np.array([number_of[x] for x in self.own_labels], dtype=np.int64)
        self.unused_classes = [
            name for number, name in enumerate(self.classes) if number not in self._numbers
        ]

    def label(self, index: int) -> int:
        return int(self._numbers[self.label_number(index)])

    @property
    def labels(self) -> Tensor:
        """Labels int64[N] of all samples."""
        rows = self._index.samples["label"]
        return torch.from_numpy(self._numbers[rows if self.rows is None else rows[self.rows]])

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover the shards' content, the classes and the split.

        They do not depend on where the data are.
        """
        return self.hash_shards(self._numbers.tolist(), self.classes)


@final
class ShardImages(ImageSamples, _Shards):
    """Samples `{"image": uint8[C, H, W], "label": int}` of images in shards.

    Args:
        image: The column of the images, or a member's ending, as `content` in `ShardSamples`.
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
        shares: Mapping[str, float] | None = None,
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
        audio: The column of the recordings, or a member's ending, as `content` in `ShardSamples`.
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
        shares: Mapping[str, float] | None = None,
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


@final
class ShardTexts(_Shards):
    """Samples `{"tokens": int64[N], "label": int}` of texts in shards.

    Args:
        text: The column of the texts, or a member's ending, as `content` in `ShardSamples`.
        tokenizer, vocabulary, length: As in `Tokenizer`.
        root, split, label, shares, key, classes, num_classes, window: As in `_Shards`.

    Raises:
        DataError: As in `_Shards`; or a text is empty, or not in UTF-8.
        ConfigError: As in `_Shards` and `Tokenizer`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        text: str = "text",
        tokenizer: str | None = None,
        vocabulary: int | None = None,
        length: int | None = None,
        label: str = "label",
        shares: Mapping[str, float] | None = None,
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        window: int = 16,
    ) -> None:
        self.field = "text"
        self._tokenizer = Tokenizer(tokenizer, vocabulary=vocabulary, length=length)
        super().__init__(
            root=root,
            split=split,
            content=("text", text),
            endings=TEXTS,
            label=label,
            shares=shares,
            key=key,
            classes=classes,
            num_classes=num_classes,
            window=window,
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        raw, shard, name = self.content(index)
        text = text_of(raw, f"{shard}, {name}")
        if not text:
            raise DataError(Problem(f"{shard}, {name}", "is an empty text"))
        tokens = self._tokenizer.encode(text, special=True)
        return {"tokens": torch.tensor(tokens), "label": self.label(index)}
