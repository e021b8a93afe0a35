"""The Free Spoken Digit Dataset: 3,000 recordings of the ten digits by six people, 8 kHz.

Source: https://github.com/Jakobovski/free-spoken-digit-dataset.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch

from samewise.datasets.parts.folders import list_files
from samewise.datasets.parts.recordings import Cache
from samewise.datasets.parts.utterances import LETTERS, Spelling, Utterances, sample
from samewise.runner.errors import ConfigError, DataError

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

_NAME = re.compile(r"([0-9])_([A-Za-z]+)_([0-9]+)\.wav")


@final
class SpokenDigits(Utterances):
    """Samples of `Utterances`: a digit's name, or several digits of one speaker in sequence.

    A sample is `{"waveform": float32[T], "length": T, "transcript": str, "name": str}`. The files
    are ROOT/recordings/DIGIT_SPEAKER_TAKE.wav, or lie in ROOT itself. By the data set's own rule
    the takes 0 to 4 are for testing.

    Args:
        root: The data set's folder.
        takes: The first and the last take that belong to this split.
        speakers: The speakers' names; None: all.
        digits: The fewest and the most digits of an utterance. With more than one, an utterance
            begins with the recording of its index; the sample's own stream draws the number of
            further recordings, which ones of the same speaker, and the pauses.
        pause: The shortest and the longest pause between two digits, in seconds.
        sample_rate: The waveforms' rate in Hz; the files have 8,000.
        letters, lowercase, ignore: As in `Spelling`.
        cache: As in `Utterances`; all recordings together take 42 MB in memory.

    Raises:
        DataError: The recordings are missing, or none has these takes and speakers.
        ConfigError: An interval is invalid.
    """

    def __init__(
        self,
        *,
        root: str,
        takes: Sequence[int] = (0, 49),
        speakers: Sequence[str] | None = None,
        digits: Sequence[int] = (1, 1),
        pause: Sequence[float] = (0.0, 0.1),
        sample_rate: int = 8000,
        letters: str = LETTERS,
        lowercase: bool = True,
        ignore: str = "",
        cache: Cache = "memory",
    ) -> None:
        for name, ends, least in (("takes", takes, 0), ("digits", digits, 1), ("pause", pause, 0)):
            ConfigError.raise_if(
                len(ends) != 2 or not least <= ends[0] <= ends[1],
                f"dataset.{name}",
                "is not a valid interval",
                list(ends),
                f"[low, high], both at least {least}",
            )
        folder = Path(root).expanduser()
        folder = folder / "recordings" if (folder / "recordings").is_dir() else folder
        chosen = [
            line
            for line in _list_recordings(folder)
            if takes[0] <= line[3] <= takes[1] and (speakers is None or line[2] in speakers)
        ]
        self._digits = (int(digits[0]), int(digits[1]))
        self._pause = (float(pause[0]), float(pause[1]))
        speaker_of = [speaker for _, _, speaker, _ in chosen]
        self.speakers = sorted(set(speaker_of))
        # Tensors: a worker would copy lists, reference count by reference count
        self._speaker = torch.tensor(
            [self.speakers.index(speaker) for speaker in speaker_of], dtype=torch.int64
        )
        self._of_speaker = [
            torch.nonzero(self._speaker == number).flatten() for number in range(len(self.speakers))
        ]
        super().__init__(
            folder,
            [name for name, *_ in chosen],
            [WORDS[digit] for _, digit, *_ in chosen],
            sample_rate=sample_rate,
            spelling=Spelling(letters=letters, lowercase=lowercase, ignore=ignore),
            cache=cache,
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        fewest, most = self._digits
        if most == 1:
            return super().__getitem__(index)
        indices, parts = [index], [self.waveform(index)]
        own_recordings = self._of_speaker[int(self._speaker[index])]
        for _ in range(int(torch.randint(fewest, most + 1, ())) - 1):
            indices.append(int(own_recordings[int(torch.randint(len(own_recordings), ()))]))
            seconds = self._pause[0] + float(torch.rand(())) * (self._pause[1] - self._pause[0])
            parts += [torch.zeros(round(seconds * self.sample_rate)), self.waveform(indices[-1])]
        return sample(
            torch.cat(parts),
            " ".join(map(self.transcript, indices)),
            "+".join(map(self.name, indices)),
        )

    def fingerprint(self) -> str:
        return (
            f"{super().fingerprint()}-{self._digits}-{self._pause}"
            if self._digits != (1, 1)
            else super().fingerprint()
        )


def _list_recordings(folder: Path) -> list[tuple[str, int, str, int]]:
    """List (file, digit, speaker, take), sorted by digit, speaker and take."""
    recordings = [
        (name, int(parts[1]), parts[2], int(parts[3]))
        for name in list_files(folder, (".wav",)).names
        if (parts := _NAME.fullmatch(name))
    ]
    DataError.raise_if(
        not recordings,
        str(folder),
        "contains no spoken digits",
        expected="files named DIGIT_SPEAKER_TAKE.wav, such as 7_jackson_32.wav",
        hint="set dataset.root=FOLDER to the data set's folder",
    )
    return sorted(recordings, key=lambda line: line[1:])
