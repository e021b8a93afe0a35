"""Generated sounds, to try a vocoder without its data: tones that glide between two pitches."""

from __future__ import annotations

from typing import Any, final

import torch

from samewise.datasets.parts.generated import Generated, triangle_wave
from samewise.runner.errors import require_at_least

_TICKS = 1 << 24
"""Fractions of a period that are distinguished."""


@final
class GeneratedClips(Generated):
    """Samples `{"waveform": float32[samples + 2 * context], "name": str, "index": int}`, as `Clips`
    gives: a gliding triangle wave under a little noise.

    Integers throughout, so the samples are the same on every machine.

    Args:
        length: How many clips.
        samples: The length of a clip.
        context: Further samples on each side of a clip.
        sample_rate: In Hz.
        split: Splits differ in their glides.
        seed: The data's own, not the experiment's.
    """

    def __init__(
        self,
        *,
        length: int = 128,
        samples: int = 200,
        context: int = 168,
        sample_rate: int = 8000,
        split: str = "train",
        seed: int = 0,
    ) -> None:
        super().__init__(length, f"clip {seed} {split}")
        require_at_least({"dataset.samples": samples, "dataset.context": context})
        self.sample_rate = sample_rate
        self._frames = samples + 2 * context

    def make(self, index: int, draw: torch.Generator) -> dict[str, Any]:
        first, last = torch.randint(100, self.sample_rate // 8, (2,), generator=draw).tolist()
        frequency = first + (last - first) * torch.arange(self._frames) // self._frames
        phase = (frequency * _TICKS // self.sample_rate).cumsum(0)
        wave = triangle_wave(phase, ticks=_TICKS, amplitude=12000) + torch.randint(
            -300, 301, (self._frames,), generator=draw
        )
        return {
            "waveform": wave.to(torch.float32) / 32768,
            "name": f"generated {index}",
            "index": index,
        }
