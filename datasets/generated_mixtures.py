"""Generated mixtures, to try a recipe without its data: each voice has its own frequency band."""

from typing import Any, final

import torch
from torch import Generator, Tensor

from samewise.datasets.parts.generated import Generated, triangle_wave
from samewise.runner.errors import ConfigError

_TICKS = 1 << 20
"""Number of phases in a period."""


@final
class GeneratedMixtures(Generated):
    """Samples `{"mixture": float32[T], "sources": float32[S, T], "length": T, "name": str}`.

    A voice is a sequence of triangle waves of 50 to 100 ms, each at a random frequency within the
    voice's octave. The bands of neighbouring voices are two octaves apart, so a small network
    separates them after some tens of steps. All arithmetic is in integers, so the samples are the
    same on every machine.

    Args:
        length: Number of mixtures.
        seconds: Length of the longest mixture; the shortest has three quarters of it, so batches
            are padded.
        num_speakers: S, the number of speakers in a mixture, from 2 to 4.
        sample_rate: Sample rate in Hz.
        split: The split's name; splits share the bands and differ in tones.
        seed: The data's own seed, independent of the experiment's.

    Raises:
        ConfigError: `num_speakers` is not between 2 and 4, or `length` is less than 1.
    """

    def __init__(
        self,
        *,
        length: int = 128,
        seconds: float = 0.5,
        num_speakers: int = 2,
        sample_rate: int = 8000,
        split: str = "train",
        seed: int = 0,
    ) -> None:
        super().__init__(length, f"mixture {seed} {split}")
        ConfigError.raise_if(
            not 2 <= num_speakers <= 4,
            "dataset.num_speakers",
            "must be between 2 and 4",
            num_speakers,
        )
        self.sample_rate = sample_rate
        self._frames = max(4, round(seconds * sample_rate))
        self._count = num_speakers

    def make(self, index: int, draw: Generator) -> dict[str, Any]:
        frames = int(torch.randint(self._frames * 3 // 4, self._frames + 1, (), generator=draw))
        sources = torch.stack(
            [
                self._voice(voice, frames, draw)
                for voice in torch.randperm(self._count, generator=draw).tolist()
            ]
        )
        return {
            "mixture": sources.sum(0),
            "sources": sources,
            "length": frames,
            "name": f"generated {index}",
        }

    def _voice(self, voice: int, frames: int, draw: Generator) -> Tensor:
        # With a factor of 4, the fourth voice would begin at 6,400 Hz, beyond the 4,000 of sound at
        # 8 kHz
        lowest = 100 * 4**voice if self._count < 4 else 60 * 3**voice
        parts, total = list[Tensor](), 0
        while total < frames:
            length = self.sample_rate * int(torch.randint(50, 101, (), generator=draw)) // 1000
            frequency = lowest + int(torch.randint(lowest, (), generator=draw))
            phase = torch.arange(length) * frequency * _TICKS // self.sample_rate
            parts.append(
                triangle_wave(
                    phase,
                    ticks=_TICKS,
                    amplitude=int(torch.randint(2000, 4001, (), generator=draw)),
                )
            )
            total += length
        return torch.cat(parts)[:frames].to(torch.float32) / 32768
