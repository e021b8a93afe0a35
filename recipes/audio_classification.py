"""Audio classification: one label for each recording, from the features of a front end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from samewise.datasets.parts.audio_files import read_audio
from samewise.datasets.parts.folders import SOUNDS
from samewise.datasets.parts.recordings import crop_or_pad
from samewise.recipes.classification import Classification
from samewise.recipes.parts import pictures
from samewise.runner.errors import ConfigError, DataError, Problem
from samewise.runner.interfaces import Batch


@final
class AudioClassification(Classification):
    """Audio classification; batches have `waveform`, `length` and `label`.

    A batch is `{"waveform": float32[B, T], "length": int64[B], "label": int64[B]}`. The transforms
    add `features` float32[B, F, N].

    Args:
        sample_rate: The waveforms' rate in Hz; a file at another rate is resampled for prediction.
        seconds: The duration that the model reads, in seconds: a longer file's middle; a shorter
            file is followed by silence.
        dimensions: 2: the model reads features as images of one channel, float32[B, 1, F, N]. 1: as
            sequences, float32[B, F, N]; with transforms=waveform, float32[B, 1, T].
        num_classes, label_smoothing, top_k, loss, metrics: As in `Classification`.

    Raises:
        ConfigError: As in `Classification`; or the transforms add no features.
    """

    def __init__(
        self,
        *,
        sample_rate: int,
        seconds: float,
        dimensions: Literal[1, 2] = 2,
        num_classes: int | None = None,
        label_smoothing: float = 0.0,
        top_k: Sequence[int] = (1, 5),
        loss: nn.Module | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            label_smoothing=label_smoothing,
            top_k=top_k,
            loss=loss,
            metrics=metrics,
        )
        self.takes, self.extensions = "recordings", SOUNDS
        self.dimensions = dimensions
        self._sample_rate, self._seconds = sample_rate, seconds

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Collate samples with `waveform` float32[T] and `label`, padded with silence.

        Raises:
            DataError: A sample has another form, or a label is out of range.
        """
        for sample in samples:
            if not isinstance(sample, dict) or not {"waveform", "label"} <= sample.keys():
                raise DataError(
                    Problem(
                        "dataset",
                        "a sample is not a recording and its label",
                        f"a dict with {sorted(map(str, sample))}"
                        if isinstance(sample, dict)
                        else f"a {type(sample).__name__}",
                        "a dict with `waveform` and `label`",
                    )
                )
        waveforms = [sample["waveform"] for sample in samples]
        lengths = [
            int(sample.get("length", len(waveform)))
            for sample, waveform in zip(samples, waveforms, strict=True)
        ]
        return {
            "waveform": nn.utils.rnn.pad_sequence(waveforms, batch_first=True),
            "length": torch.tensor(lengths, dtype=torch.int64),
            "label": self.labels([sample["label"] for sample in samples]),
        }

    def inputs(self, batch: Batch) -> Tensor:
        if "features" not in batch:
            raise ConfigError(
                Problem(
                    "transforms",
                    "give the model no features to read",
                    hint="transforms=mel, mfcc or waveform",
                )
            )
        return batch["features"] if self.dimensions == 1 else batch["features"][:, None]

    def thumbnails(self, batch: Batch, shown: Tensor) -> Tensor:
        """Return pictures of the features, low frequencies at the bottom."""
        return pictures.thumbnails(batch["features"][shown, None].flip(2))

    def read(self, file: Path) -> dict[str, Any]:
        """Read a recording, with a placeholder label."""
        waveform, _ = read_audio(file, sample_rate=self._sample_rate)
        frames = max(1, round(self._seconds * self._sample_rate))
        return {
            "waveform": crop_or_pad(waveform, frames),
            "length": min(len(waveform), frames),
            "label": 0,
        }
