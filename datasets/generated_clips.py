"""Sounds made on the spot, for trying a vocoder without its data: tones that glide from one pitch to another."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, final

import torch
from torch.utils.data import Dataset

from samewise.runner.errors import ConfigError, Problem

_TICKS = 1 << 24
"""Fractions of a period that are distinguished."""


@final
class GeneratedClips(Dataset[dict[str, Any]]):
    """Samples `{"waveform": float32[samples + 2 * context], "name": str, "index": int}`, as `Clips` gives: a gliding triangle wave under a little noise.

    Integers throughout, so the samples are the same on every machine.

    Args:
        length: How many clips.
        samples: Of a clip.
        context: On each side of it.
        sample_rate: In Hz.
        split: Splits differ in their glides.
        seed: The data's own, not the experiment's.
    """

    def __init__(self, *, length: int = 128, samples: int = 200, context: int = 168, sample_rate: int = 8000, split: str = "train", seed: int = 0) -> None:
        for name, value in (("length", length), ("samples", samples), ("context", context)):
            if value < 1:
                raise ConfigError(Problem(f"dataset.{name}", "must be at least 1", value))
        self.sample_rate = sample_rate
        self._length = length
        self._frames = samples + 2 * context
        self._name = f"{seed} {split}"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        draw = torch.Generator()
        draw.manual_seed(int.from_bytes(blake2b(f"clip {self._name} {index}".encode(), digest_size=8).digest(), "little"))
        first, last = torch.randint(100, self.sample_rate // 8, (2,), generator=draw).tolist()
        frequency = first + (last - first) * torch.arange(self._frames) // self._frames
        phase = (frequency * _TICKS // self.sample_rate).cumsum(0) % _TICKS
        wave = ((phase - _TICKS // 2).abs() - _TICKS // 4) * 12000 // (_TICKS // 4) + torch.randint(-300, 301, (self._frames,), generator=draw)
        return {"waveform": wave.to(torch.float32) / 32768, "name": f"generated {index}", "index": index}
