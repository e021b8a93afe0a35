"""LibriMix: mixtures of LibriSpeech's readers, as its scripts generate them.

Source: Cosentino et al. 2020, LibriMix: An Open-Source Dataset for Generalizable Speech Separation,
arXiv 2005.11262; scripts at https://github.com/JorisCos/LibriMix.
"""

from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.mixture_files import MixtureFiles
from samewise.runner.errors import ConfigError, nearest

SUBSETS = ("train-360", "train-100", "dev", "test")


@final
class LibriMix(MixtureFiles):
    """Samples of `MixtureFiles` from LibriMix.

    A sample is `{"mixture": float32[T], "sources": float32[S, T], "length": T, "name": str}`. The
    files are ROOT/LibriSMix/wavRk/MODE/SUBSET/{mix_clean,mix_both,s1,s2,...}/*.wav.

    Args:
        root: The folder Libri2Mix (or Libri3Mix), or the folder that holds it.
        subset: One of `SUBSETS`.
        speakers: S, the number of speakers in a mixture, 2 or 3.
        sample_rate: Sample rate of the files in Hz, 8000 or 16000.
        mode: "min": a mixture ends with its shortest part; "max": with its longest.
        noise: Separate mixtures with noise (the task sep_noisy); otherwise without (sep_clean).
        seconds: As in `MixtureFiles`.

    Raises:
        ConfigError: The subset is unknown.
        DataError: As in `MixtureFiles`.
    """

    def __init__(
        self,
        *,
        root: str,
        subset: str,
        speakers: Literal[2, 3] = 2,
        sample_rate: Literal[8000, 16000] = 8000,
        mode: Literal["min", "max"] = "min",
        noise: bool = False,
        seconds: float | None = None,
    ) -> None:
        ConfigError.raise_if(
            subset not in SUBSETS,
            "dataset.subset",
            "LibriMix has no such part",
            subset,
            ", ".join(SUBSETS),
            nearest(subset, SUBSETS),
        )
        base = Path(root).expanduser()
        folder = base if base.name == f"Libri{speakers}Mix" else base / f"Libri{speakers}Mix"
        super().__init__(
            folder / f"wav{sample_rate // 1000}k" / mode / subset,
            mixture="mix_both" if noise else "mix_clean",
            sources=[f"s{number}" for number in range(1, speakers + 1)],
            sample_rate=sample_rate,
            seconds=seconds,
            data=f"Libri{speakers}Mix",
        )
