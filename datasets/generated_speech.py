"""Generated speech, to try a recipe without its data: each letter is a different tone."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from samewise.datasets.parts.generated import Generated, triangle_wave
from samewise.datasets.parts.utterances import LETTERS, sample
from samewise.runner.errors import ConfigError, require_at_least

_TICKS = 1 << 20
"""Number of phases in a period."""


@final
class GeneratedSpeech(Generated):
    """Samples `{"waveform": float32[T], "length": T, "transcript": str, "name": str}` of tones.

    The transcript consists of random letters. A letter is a triangle wave of 40 to 80 ms between
    300 Hz and 3 kHz, a space is a pause, and all is under a little noise. A small network learns
    the letters in some hundreds of steps. All arithmetic is in integers, so the samples are the
    same on every machine.

    Args:
        length: Number of utterances.
        sample_rate: Sample rate in Hz.
        letters: The letters; the first is silent (a space), the rest are tones.
        tones: Number of letters that are used.
        characters: Fewest and most letters of an utterance.
        split: The split's name; splits share the tones and differ in texts.
        seed: The data's own seed, independent of the experiment's.

    Raises:
        ConfigError: A number is too small, or `characters` is not a valid interval.
    """

    def __init__(
        self,
        *,
        length: int = 256,
        sample_rate: int = 16000,
        letters: str = LETTERS,
        tones: int = 8,
        characters: Sequence[int] = (2, 8),
        split: str = "train",
        seed: int = 0,
    ) -> None:
        super().__init__(length, f"{seed} {split}")
        require_at_least({"dataset.sample_rate": sample_rate, "dataset.tones": tones})
        self.sample_rate = sample_rate
        self._letters = letters
        self._tones = min(tones, len(letters) - 1)
        ConfigError.raise_if(
            len(characters) != 2 or not 1 <= characters[0] <= characters[1],
            "dataset.characters",
            "is not a valid interval",
            list(characters),
            "[low, high], both at least 1",
        )
        self._characters = (int(characters[0]), int(characters[1]))

    def make(self, index: int, draw: torch.Generator) -> dict[str, Any]:
        fewest, most = self._characters
        count = int(torch.randint(fewest, most + 1, (), generator=draw))
        chosen = torch.randint(
            len(self._letters) - self._tones, len(self._letters), (count,), generator=draw
        )
        # Longer texts have a space in the middle
        if count > 4:
            chosen[count // 2] = 0
        waveform = torch.cat([self._tone(int(number), draw) for number in chosen])
        waveform = waveform + torch.randint(-600, 601, waveform.shape, generator=draw)
        return sample(
            waveform.to(torch.float32) / 32768,
            "".join(self._letters[int(number)] for number in chosen),
            f"generated {index}",
        )

    def _tone(self, letter: int, draw: torch.Generator) -> Tensor:
        """Return int64[T] of 16 bits: a triangle wave, and a gap of 10 ms."""
        frames = self.sample_rate * int(torch.randint(40, 81, (), generator=draw)) // 1000
        # The gap separates doubled letters
        gap = torch.zeros(self.sample_rate // 100, dtype=torch.int64)
        if letter == 0:
            return torch.cat([torch.zeros(frames, dtype=torch.int64), gap])
        place = letter - (len(self._letters) - self._tones)
        frequency = 300 + 2700 * place // max(self._tones - 1, 1)
        phase = torch.arange(frames) * frequency * _TICKS // self.sample_rate
        return torch.cat([triangle_wave(phase, ticks=_TICKS, amplitude=12000), gap])
