"""Generated sounds, to try a vocoder without its data: tones that glide between two pitches."""

from typing import Any, final

import torch

from samewise.datasets.parts.generated import Generated, triangle_wave
from samewise.runner.errors import require_at_least

_TICKS = 1 << 24
"""Number of phases in a period."""


@final
class GeneratedClips(Generated):
    """Samples `{"waveform": float32[samples + 2 * context], "name": str, "index": int}`.

    They have the form of `Clips`: a gliding triangle wave under a little noise. All arithmetic is
    in integers, so the samples are the same on every machine.

    Args:
        length: Number of clips.
        samples: A clip's length in samples.
        context: Further samples on each side of a clip.
        sample_rate: Sample rate in Hz.
        split: The split's name; splits differ in their glides.
        seed: The data's own seed, independent of the experiment's.

    Raises:
        ConfigError: A length is too small.
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
        start_frequency, end_frequency = torch.randint(
            100, self.sample_rate // 8, (2,), generator=draw
        ).tolist()
        frequency = (
            start_frequency
            + (end_frequency - start_frequency) * torch.arange(self._frames) // self._frames
        )
        phase = (frequency * _TICKS // self.sample_rate).cumsum(0)
        wave = triangle_wave(phase, ticks=_TICKS, amplitude=12000) + torch.randint(
            -300, 301, (self._frames,), generator=draw
        )
        return {
            "waveform": wave.to(torch.float32) / 32768,
            "name": f"generated {index}",
            "index": index,
        }
