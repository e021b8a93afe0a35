"""Base of data sets of recorded mixtures.

A folder holds the mixtures, and one folder for each speaker holds the parts, with the same file
names.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from samewise.datasets.parts.audio_files import (
    AudioInfo,
    SoundSamples,
    audio_info,
    read_audio,
)
from samewise.datasets.parts.contents import CONTENTS, spaced_indices
from samewise.datasets.parts.folders import list_files
from samewise.datasets.parts.limits import add_content
from samewise.datasets.parts.recordings import Texts, warn_of_silence
from samewise.runner.errors import ConfigError, DataError, Problem, first_few

_HEADERS = 1_000
"""Number of mixtures whose headers are read before training."""


class MixtureFiles(SoundSamples):
    """Samples `{"mixture": float32[T], "sources": float32[S, T], "length": T, "name": str}`.

    A subclass names the folders.

    Args:
        folder: The folder of one split, which holds the other folders.
        mixture: The folder of the mixtures.
        sources: The folders of the S speakers' parts.
        sample_rate: The rate of all files in Hz.
        seconds: Longest stretch of a mixture in seconds, whose start the sample's own stream draws;
            None: the whole mixture.
        data: The data set's name, for messages.

    Raises:
        ConfigError: `seconds` is not greater than 0.
        DataError: A folder or file is missing; or, among up to 1,000 mixtures, evenly spaced, a
            file is not audio by its header, has another rate, or is a part whose length differs
            from its mixture's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mixture: str,
        sources: Sequence[str],
        sample_rate: int,
        seconds: float | None,
        data: str,
    ) -> None:
        ConfigError.raise_if(
            seconds is not None and seconds <= 0,
            "dataset.seconds",
            "is not a valid duration",
            seconds,
            "more than 0, or null for whole mixtures",
        )
        self.sample_rate = sample_rate
        self._folder = folder
        self._mixture = mixture
        self._sources = tuple(sources)
        self._frames = None if seconds is None else max(1, round(seconds * sample_rate))
        names = _list_mixtures(folder, mixture, sources, data)
        self._names = Texts(names)
        for index in spaced_indices(len(names), _HEADERS):
            frames = self._info(mixture, names[index]).frames
            for part in sources:
                self._require_length(part, names[index], frames)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        name = self._names[index]
        info = self._info(self._mixture, name)
        frames = info.frames if self._frames is None else min(self._frames, info.frames)
        start = int(torch.randint(info.frames - frames + 1, ()))
        # The start checks the headers of up to 1,000 mixtures only
        for part in self._sources:
            self._require_length(part, name, info.frames)
        mixture, *sources = (
            read_audio(self._folder / part / name, start=start, frames=frames)[0]
            for part in (self._mixture, *self._sources)
        )
        for part, source in zip(self._sources, sources, strict=True):
            # Of a silent stretch, the rest may be sound
            if not source.any() and not read_audio(self._folder / part / name)[0].any():
                warn_of_silence(str(self._folder / part / name))
        return {"mixture": mixture, "sources": torch.stack(sources), "length": frames, "name": name}

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover the names, the folders, and the bytes of 64 mixtures."""
        digest = blake2b(
            repr(
                (len(self), self._mixture, self._sources, self.sample_rate, self._frames)
            ).encode(),
            digest_size=16,
        )
        digest.update(self._names.block)
        digest.update(self._names.ends)
        for place in spaced_indices(len(self), CONTENTS):
            for folder in (self._mixture, *self._sources):
                add_content(digest, self._folder / folder / self._names[place])
        return digest.hexdigest()

    def _info(self, part: str, name: str) -> AudioInfo:
        """Read a file's header, and check its rate."""
        path = self._folder / part / name
        info = audio_info(path)
        if info.sample_rate != self.sample_rate:
            raise DataError(
                Problem(
                    str(path),
                    "has a different sample rate",
                    info.sample_rate,
                    f"{self.sample_rate} Hz",
                    "set dataset.sample_rate",
                )
            )
        return info

    def _require_length(self, part: str, name: str, frames: int) -> None:
        """Raise a DataError unless a speaker's part has as many frames as its mixture."""
        if (frames_of_part := self._info(part, name).frames) != frames:
            raise DataError(
                Problem(
                    str(self._folder / part / name),
                    "is not as long as its mixture",
                    f"{frames_of_part} frames",
                    f"{frames} frames",
                    "generate the data set again: all files of a mixture are equally long, in "
                    "min and max mode",
                )
            )


def _list_mixtures(folder: Path, mixture: str, sources: Sequence[str], data: str) -> list[str]:
    """List the mixtures' names, each of which has all its parts."""
    for name in (mixture, *sources):
        DataError.raise_if(
            not (folder / name).is_dir(),
            str(folder / name),
            f"this folder of {data} was not found",
            expected=f"{', '.join((mixture, *sources))} in {folder}",
            hint=f"set dataset.root=FOLDER to where {data} was generated",
        )
    names = list_files(folder / mixture, (".wav", ".flac")).names
    for part in sources:
        missing = sorted(set(names) - set(list_files(folder / part, (".wav", ".flac")).names))
        DataError.raise_if(
            missing,
            str(folder / part),
            f"files of mixtures are missing: {first_few(missing, 3)}",
            hint="generate the data set again",
        )
    return names
