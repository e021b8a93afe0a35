"""Short clips of recordings with their surroundings, for training a vocoder."""

from hashlib import blake2b
from typing import Any

import torch
import torch.nn.functional as F

from samewise.datasets.parts.audio_files import SoundSamples
from samewise.datasets.parts.recordings import Recordings
from samewise.runner.errors import require_at_least


class Clips(SoundSamples):
    """Samples `{"waveform": float32[samples + 2 * context], "name": str, "index": int}`.

    There is one for each recording; a subclass lists the recordings.

    The sample's own random stream draws where a clip begins. `context` samples lie before and after
    the clip, for the windows of a front end. Silence fills what lies beyond the recording, also
    within a clip that is longer than its recording.

    Args:
        recordings: The recordings.
        samples: The clip's length in samples; a multiple of the front end's hop.
        context: Further samples on each side of a clip: `context` of the front end.

    Raises:
        ConfigError: `samples` or `context` is too small.
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
        # One sample after the clip is needed: the vocoder predicts it too
        latest = max(0, frames - self._samples - 1)
        start = int(torch.randint(latest + 1, ()))
        begin, end = (
            max(0, start - self._context),
            min(frames, start + self._samples + self._context),
        )
        waveform = self._recordings.stretch(index, begin, end - begin)
        before, size = begin - start + self._context, self._samples + 2 * self._context
        return {
            "waveform": F.pad(waveform, (before, size - before - len(waveform))),
            "name": self._recordings.names[index],
            "index": index,
        }

    def fingerprint(self) -> str:
        """Return 32 hex digits that identify the recordings and the clips' size."""
        return blake2b(
            f"{self._recordings.fingerprint()} {self._samples} {self._context}".encode(),
            digest_size=16,
        ).hexdigest()
