"""Mixtures generated from any folder of speakers' recordings.

Who speaks, what, when and how loudly is random for each mixture.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, final

import torch
from torch import Generator, Tensor

from samewise.datasets.parts.audio_files import SoundSamples, match_audio
from samewise.datasets.parts.generated import generator_of
from samewise.datasets.parts.names import require_distinct
from samewise.datasets.parts.recordings import Cache, Recordings
from samewise.datasets.transforms.images import interval
from samewise.runner.errors import ConfigError, DataError, Problem, number_of, require_at_least

# At this level, speech stays well inside [-1, 1]
_LOUDNESS = 0.05
"""Root mean square of a speaker at 0 dB."""
_SILENCE = 1e-4


@final
class SpeakerMixtures(SoundSamples):
    """Samples `{"mixture": float32[T], "sources": float32[S, T], "length": T, "name": str}`.

    All samples have the same length. Each of S different speakers is heard in their own recordings,
    drawn one after the other with pauses between them, until the mixture is full; a long recording
    may begin in its middle. The levels differ as in WSJ0-mix (arXiv 1508.04306).

    Args:
        root: The folder of recordings.
        pattern: A regular expression with a group `speaker`, which a file's name, relative to the
            folder, must match completely to belong to this split. The default expects a folder for
            each speaker; `[0-9]_(?P<speaker>[a-z]+)_[0-4][.]wav` selects the spoken digits' first
            takes.
        length: Number of mixtures in an epoch.
        seconds: Length of a mixture in seconds.
        num_speakers: S, the number of speakers in a mixture.
        sample_rate: The waveforms' rate in Hz; files at another rate are resampled.
        levels: Interval of each speaker's level in dB.
        pause: Interval of the pauses before recordings in seconds.
        fixed: Draw each mixture by its index alone, the same in every epoch, for evaluation.
            Otherwise the sample's own stream draws it.
        seed: Seed of fixed mixtures: the data's own, independent of the experiment's.
        cache: "memory" keeps all recordings, decoded.

    Raises:
        DataError: No file matches, or there are fewer than S speakers.
        ConfigError: The pattern has no group `speaker`, or an interval or number is invalid.
    """

    def __init__(
        self,
        *,
        root: str,
        pattern: str = "(?P<speaker>[^/]+)/.+",
        length: int = 1000,
        seconds: float = 2.0,
        num_speakers: int = 2,
        sample_rate: int = 8000,
        levels: Sequence[float] = (-2.5, 2.5),
        pause: Sequence[float] = (0.0, 0.2),
        fixed: bool = False,
        seed: int = 0,
        cache: Cache = "none",
    ) -> None:
        require_at_least({"dataset.length": length, "dataset.sample_rate": sample_rate})
        require_at_least({"dataset.num_speakers": num_speakers}, least=2)
        ConfigError.raise_if(
            seconds <= 0, "dataset.seconds", "is not a valid duration", seconds, "more than 0"
        )
        folder = Path(root).expanduser()
        files_by_speaker = _group_by_speaker(folder, pattern, num_speakers)
        self.sample_rate = sample_rate
        self.speakers = list(files_by_speaker)
        self._settings = repr(
            (length, seconds, num_speakers, list(levels), list(pause), fixed, seed)
        )
        self._length, self._fixed, self._seed = length, fixed, seed
        self._count, self._frames = num_speakers, max(1, round(seconds * sample_rate))
        self._levels = interval("dataset.levels", levels)
        self._pause = interval("dataset.pause", pause, low=0.0)
        self._recordings = Recordings(
            folder,
            [name for names in files_by_speaker.values() for name in names],
            sample_rate=sample_rate,
            cache=cache,
        )
        counts = torch.tensor([len(names) for names in files_by_speaker.values()])
        # A speaker's recordings follow each other
        self._first, self._counts = (counts.cumsum(0) - counts).tolist(), counts.tolist()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        draw = (
            generator_of(f"mixture {self._seed} {index}")
            if self._fixed
            else torch.default_generator
        )
        speakers = torch.randperm(len(self.speakers), generator=draw)[: self._count].tolist()
        sources = torch.stack([self._track(speaker, draw) for speaker in speakers])
        low, high = self._levels
        decibels = low + (high - low) * torch.rand(self._count, 1, generator=draw)
        # A silent track stays silent, and is not divided by 0
        loudness = sources.square().mean(1, keepdim=True).sqrt().clamp(min=_SILENCE)
        sources = sources * (_LOUDNESS * 10.0 ** (decibels / 20.0) / loudness)
        name = f"{index} " + "+".join(self.speakers[speaker] for speaker in speakers)
        return {"mixture": sources.sum(0), "sources": sources, "length": self._frames, "name": name}

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover the recordings and the mixtures' settings."""
        return blake2b(
            f"{self._recordings.fingerprint()} {self._settings}".encode(), digest_size=16
        ).hexdigest()

    def _track(self, speaker: int, draw: Generator) -> Tensor:
        """Return float32[T]: one speaker's recordings in sequence, from a random start."""
        shortest, longest = self._pause
        # (recording, its first frame, the frame after its last)
        pieces, total = (
            list[tuple[int, int, int]](),
            0,
        )
        while total < self._frames:
            index = self._first[speaker] + int(
                torch.randint(self._counts[speaker], (), generator=draw)
            )
            begin = total + round(
                (shortest + (longest - shortest) * float(torch.rand((), generator=draw)))
                * self.sample_rate
            )
            total = begin + self._recordings.frames(index)
            pieces.append((index, begin, total))
        start = int(torch.randint(total - self._frames + 1, (), generator=draw))
        track = torch.zeros(self._frames)
        for index, begin, end in pieces:
            low, high = max(begin, start), min(end, start + self._frames)
            if low < high:
                track[low - start : high - start] = self._recordings.stretch(
                    index, low - begin, high - low
                )
        return track


def _group_by_speaker(folder: Path, pattern: str, count: int) -> dict[str, list[str]]:
    """Return each speaker's files, by sorted speaker."""
    files_by_speaker = dict[str, list[str]]()
    expected = "a folder for each speaker, or a dataset.pattern of your own"
    matched, _ = match_audio(folder, pattern, groups={"speaker": "speaker"}, expected=expected)
    for name, match in matched.items():
        files_by_speaker.setdefault(match["speaker"], []).append(name)
    require_distinct(str(folder), files_by_speaker, what="speaker")
    if len(files_by_speaker) < count:
        speakers = ", ".join(sorted(files_by_speaker))
        raise DataError(
            Problem(
                str(folder),
                f"has recordings of {number_of(len(files_by_speaker), 'speaker')} ({speakers}), "
                f"too few for mixtures of {count}",
                expected=f"at least {count} speakers",
                hint="dataset.pattern marks the part of a file's name that is the speaker",
            )
        )
    return {speaker: files_by_speaker[speaker] for speaker in sorted(files_by_speaker)}
