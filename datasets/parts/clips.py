"""Short clips of recordings with their surroundings, for training a vocoder."""

from __future__ import annotations

import abc
from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from samewise.datasets.parts.audio_files import audio_preparation
from samewise.datasets.parts.recordings import Recordings
from samewise.runner.errors import require_at_least


class Clips(Dataset[dict[str, Any]], abc.ABC):
    """Samples `{"waveform": float32[samples + 2 * context], "name": str, "index": int}`, one per
    recording; a subclass lists the recordings.

    Where a clip begins is drawn by the sample's own stream. `context` samples lie before and after
    it, for the windows of a front end; beyond a recording's ends there is silence, within a clip
    too where a recording is shorter.

    Args:
        recordings: The recordings.
        samples: The length of a clip; a multiple of the front end's hop.
        context: Further samples on each side of a clip: `context` of the front end.
    """

    def __init__(self, recordings: Recordings, *, samples: int, context: int) -> None:
        require_at_least({"dataset.samples": samples, "dataset.context": context})
        self.sample_rate = recordings.sample_rate
        self._recordings = recordings
        self._samples = samples
        self._context = context

    def __len__(self) -> int:
        return len(self._recordings)

    def __getitem__(self, index: int) -> dict[str, Any]:
        frames = self._recordings.frames(index)
        latest = max(0, frames - self._samples - 1)  # the sample after a clip is predicted too
        start = int(torch.randint(latest + 1, ()))
        begin, end = (
            max(0, start - self._context),
            min(frames, start + self._samples + self._context),
        )
        heard = self._recordings.stretch(index, begin, end - begin)
        return {
            "waveform": self._pad(heard, begin - start + self._context),
            "name": self._recordings.names[index],
            "index": index,
        }

    @property
    def preparation(self) -> dict[str, Any]:
        """How a recording becomes a waveform, for those who do it elsewhere."""
        return audio_preparation(self.sample_rate)

    def fingerprint(self) -> str:
        """32 hex digits of the recordings and the clips' size."""
        return blake2b(
            f"{self._recordings.fingerprint()} {self._samples} {self._context}".encode(),
            digest_size=16,
        ).hexdigest()

    def _pad(self, heard: Tensor, before: int) -> Tensor:
        return F.pad(heard, (before, self._samples + 2 * self._context - before - len(heard)))
