"""Generated sounds, to try a recipe without its data: each class is a different tone."""

from typing import Any, final

from torch.utils.data import Dataset

from samewise.datasets.generated_speech import GeneratedSpeech
from samewise.datasets.parts.recordings import crop_or_pad
from samewise.runner.errors import ConfigError


@final
class GeneratedSounds(Dataset[dict[str, Any]]):
    """Samples `{"waveform": float32[T], "length": int, "label": int, "name": str}` of tones.

    A sample is one of `GeneratedSpeech`'s tones, followed by silence.

    Args:
        length: Number of samples.
        num_classes: Number of tones, at most 26.
        seconds: Length of a sample in seconds.
        sample_rate: Sample rate in Hz.
        split: The split's name; splits share the tones.

    Raises:
        ConfigError: `num_classes` is not between 1 and 26.
    """

    def __init__(
        self,
        *,
        length: int = 256,
        num_classes: int = 10,
        seconds: float = 0.1,
        sample_rate: int = 8000,
        split: str = "train",
    ) -> None:
        ConfigError.raise_if(
            not 1 <= num_classes <= 26,
            "dataset.num_classes",
            "is not a valid number of tones",
            num_classes,
            "1 to 26",
        )
        self.classes = [f"tone {number}" for number in range(num_classes)]
        letters = " " + "abcdefghijklmnopqrstuvwxyz"[:num_classes]
        self._tones = GeneratedSpeech(
            length=length,
            sample_rate=sample_rate,
            letters=letters,
            tones=num_classes,
            characters=(1, 1),
            split=split,
        )
        self.sample_rate, self._frames = sample_rate, max(1, round(seconds * sample_rate))

    def __len__(self) -> int:
        return len(self._tones)

    def __getitem__(self, index: int) -> dict[str, Any]:
        utterance = self._tones[index]
        waveform, label = (
            crop_or_pad(utterance["waveform"], self._frames),
            ord(utterance["transcript"]) - ord("a"),
        )
        return {
            "waveform": waveform,
            "length": min(utterance["length"], self._frames),
            "label": label,
            "name": utterance["name"],
        }
