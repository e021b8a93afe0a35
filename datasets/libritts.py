"""LibriTTS: 585 hours of LibriSpeech's readers at 24 kHz, as unpacked from its archives.

Source: Zen et al. 2019, LibriTTS: A Corpus Derived from LibriSpeech for Text-to-Speech, arXiv
1904.02882.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import final

from samewise.datasets.librispeech import SUBSETS
from samewise.datasets.parts.clips import Clips
from samewise.datasets.parts.folders import list_files
from samewise.datasets.parts.recordings import Cache, Recordings
from samewise.runner.errors import ConfigError, DataError, nearest

_ARCHIVE = "LibriTTS"


@final
class LibriTTS(Clips):
    """Samples of `Clips` from LibriTTS.

    A sample is `{"waveform": float32[samples + 2 * context], "name": str, "index": int}`. The files
    are ROOT/LibriTTS/SUBSET/READER/CHAPTER/*.wav.

    Args:
        root: The folder LibriTTS, or the folder that holds it.
        subsets: One or several of LibriSpeech's `SUBSETS`.
        samples, context: As in `Clips`.
        sample_rate: The waveforms' rate in Hz; the files have 24,000 and are resampled.
        cache: "memory" keeps all recordings, decoded.

    Raises:
        DataError: A subset is missing.
        ConfigError: The subset is unknown.
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
        base = Path(root).expanduser()
        folder = base / _ARCHIVE if (base / _ARCHIVE).is_dir() else base
        names = list[str]()
        for subset in subsets:
            ConfigError.raise_if(
                subset not in SUBSETS,
                "dataset.subsets",
                "LibriTTS has no such part",
                subset,
                ", ".join(SUBSETS),
                nearest(subset, SUBSETS),
            )
            DataError.raise_if(
                not (folder / subset).is_dir(),
                str(folder / subset),
                "this part of LibriTTS was not found",
                expected="its archive, unpacked",
                hint="set dataset.root=FOLDER to where its archives were unpacked",
            )
            names += [f"{subset}/{name}" for name in list_files(folder / subset, (".wav",)).names]
        super().__init__(
            Recordings(folder, names, sample_rate=sample_rate, cache=cache),
            samples=samples,
            context=context,
        )
