"""LibriTTS: 585 hours of LibriSpeech's readers at 24 kHz (Zen et al., arXiv 1904.02882), as
unpacked from its archives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

from samewise.datasets.parts.clips import Clips
from samewise.datasets.parts.folders import list_files
from samewise.datasets.parts.recordings import Cache, Recordings
from samewise.runner.errors import ConfigError, DataError, Problem, nearest

SUBSETS = (
    "dev-clean",
    "dev-other",
    "test-clean",
    "test-other",
    "train-clean-100",
    "train-clean-360",
    "train-other-500",
)

_ARCHIVE = "LibriTTS"


@final
class LibriTTS(Clips):
    """Samples as `Clips`.

    Files are ROOT/LibriTTS/SUBSET/READER/CHAPTER/*.wav. ROOT may be the folder LibriTTS itself.

    Args:
        root: Holds the folder LibriTTS.
        subsets: One or several of `SUBSETS`.
        samples, context: As in `Clips`.
        sample_rate: In Hz; the files have 24,000 and are resampled.
        cache: "memory" keeps all recordings decoded.

    Raises:
        DataError: a subset is missing.
        ConfigError: the subset is unknown.
    """

    def __init__(
        self,
        *,
        root: str,
        subsets: Sequence[str],
        samples: int,
        context: int,
        sample_rate: int = 22050,
        cache: Cache = "none",
    ) -> None:
        given = Path(root).expanduser()
        folder = given / _ARCHIVE if (given / _ARCHIVE).is_dir() else given
        names = list[str]()
        for subset in subsets:
            if subset not in SUBSETS:
                raise ConfigError(
                    Problem(
                        "dataset.subsets",
                        "LibriTTS has no such part",
                        subset,
                        ", ".join(SUBSETS),
                        nearest(subset, SUBSETS),
                    )
                )
            if not (folder / subset).is_dir():
                hint = "set dataset.root=FOLDER to where its archives were unpacked"
                raise DataError(
                    Problem(
                        str(folder / subset),
                        "this part of LibriTTS was not found",
                        expected="its archive, unpacked",
                        hint=hint,
                    )
                )
            names += [f"{subset}/{name}" for name in list_files(folder / subset, (".wav",)).names]
        super().__init__(
            Recordings(folder, names, sample_rate=sample_rate, cache=cache),
            samples=samples,
            context=context,
        )
