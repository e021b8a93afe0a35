"""Bases of data sets whose samples are encoded files within larger ones: images, recordings."""

import abc
import tempfile
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from samewise.datasets.parts.audio_files import audio_preparation, read_audio
from samewise.datasets.parts.decode import Mode, decode_file, image_preparation
from samewise.datasets.parts.encoded import EncodedImages
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.recordings import crop_or_pad, warn_of_silence
from samewise.datasets.parts.upright import turn_upright
from samewise.runner.errors import DataError


class EncodedSamples(Dataset[dict[str, Any]], abc.ABC):
    """Samples by number, each with a label; a subclass sets the names of the `classes`."""

    field: str
    """The name of the content among a sample's fields."""

    @abc.abstractmethod
    def content(self, index: int) -> tuple[bytes, str, str]:
        """Return a sample's encoded content, the file that holds it, and its name in there."""

    @abc.abstractmethod
    def label(self, index: int) -> int:
        """Return the number of a sample's class."""

    def fields(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return a sample's key, and its fields as a shard has them."""
        content, _, name = self.content(index)
        return name, {self.field: content, "label": self.classes[self.label(index)]}


class ImageSamples(EncodedSamples):
    """Samples `{"image": uint8[C, H, W], "label": int}`.

    A subclass sets these attributes:
        mode: "rgb" (C is 3) or "gray" (C is 1).
        upright: Whether to turn images by their EXIF orientation, as Hugging Face's library does.
        transform: Applied to each image, in the worker.
        encoded: Whether images stay encoded, for the batch transform `Decode`.
    """

    field = "image"
    mode: Mode
    upright: bool
    transform: Transform | None
    encoded: bool = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        raw, file, name = self.content(index)
        where = f"{file}, {name}"
        if self.encoded:
            encoded = EncodedImages.from_file(raw, where, mode=self.mode)
            return {"image": encoded, "label": self.label(index)}
        image: Tensor = decode_file(raw, where, mode=self.mode)
        image = turn_upright(image, raw, where) if self.upright else image
        return {
            "image": image if self.transform is None else self.transform(image),
            "label": self.label(index),
        }

    @property
    def preparation(self) -> dict[str, Any]:
        """How a file becomes an image, for programs that prepare images elsewhere."""
        return image_preparation(self.mode, upright=self.upright)


class RecordingSamples(EncodedSamples):
    """Samples `{"waveform": float32[T], "length": int, "label": int, "name": str}`.

    All samples have length T; `length` excludes the silence at the end. A subclass sets these
    attributes:
        sample_rate: The waveforms' rate in Hz; recordings at another rate are resampled.
        frames: T.
        is_training: Whether a longer recording is cut to a section that the sample's own stream
            draws, else to the middle.
    """

    field = "audio"
    sample_rate: int
    frames: int
    is_training: bool

    def __getitem__(self, index: int) -> dict[str, Any]:
        raw, holder, name = self.content(index)
        waveform = decode_audio(raw, f"{holder}, {name}", sample_rate=self.sample_rate)
        spare = len(waveform) - self.frames
        start = (
            0
            if spare <= 0
            else int(torch.randint(spare + 1, ()))
            if self.is_training
            else spare // 2
        )
        section = waveform[start : start + self.frames]
        return {
            "waveform": crop_or_pad(section, self.frames),
            "length": len(section),
            "label": self.label(index),
            "name": name,
        }

    @property
    def preparation(self) -> dict[str, Any]:
        """How a recording becomes a waveform, for programs that prepare recordings elsewhere."""
        return audio_preparation(self.sample_rate, frames=self.frames)


def decode_audio(raw: bytes, where: str, *, sample_rate: int) -> Tensor:
    """Decode a recording to float32[T] at a rate in Hz; `where` names it in errors.

    Raises:
        DataError: It is damaged, or no recording.
    """
    # The decoders read files, not bytes
    with tempfile.NamedTemporaryFile(prefix="samewise-") as file:
        file.write(raw)
        file.flush()
        try:
            waveform, _ = read_audio(file.name, sample_rate=sample_rate)
        except DataError as error:
            raise DataError(*(replace(x, path=where) for x in error.problems)) from None
    if not waveform.any():
        warn_of_silence(where)
    return waveform
