"""LibriMix: mixtures of LibriSpeech's readers (Cosentino et al., arXiv 2005.11262), as its scripts
generate them (github.com/JorisCos/LibriMix).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.mixture_files import MixtureFiles
from samewise.runner.errors import ConfigError, Problem, nearest

SUBSETS = ("train-360", "train-100", "dev", "test")


@final
class LibriMix(MixtureFiles):
    """Samples as `MixtureFiles`.

    Files are ROOT/LibriSMix/wavRk/MODE/SUBSET/{mix_clean,mix_both,s1,s2,...}/*.wav, ROOT's first
    folder being optional.

    Args:
        root: Holds the folder Libri2Mix (or Libri3Mix), or is it.
        subset: One of `SUBSETS`.
        speakers: S, how many speakers a mixture has, 2 or 3.
        sample_rate: 8000 or 16000 Hz.
        mode: "min": mixtures end with their shortest part; "max": with the longest.
        noise: Separate mixtures with noise in them (the task sep_noisy); else sep_clean.
        seconds: As in `MixtureFiles`.
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
        if subset not in SUBSETS:
            raise ConfigError(
                Problem(
                    "dataset.subset",
                    "LibriMix has no such part",
                    subset,
                    ", ".join(SUBSETS),
                    nearest(subset, SUBSETS),
                )
            )
        given = Path(root).expanduser()
        folder = given if given.name == f"Libri{speakers}Mix" else given / f"Libri{speakers}Mix"
        super().__init__(
            folder / f"wav{sample_rate // 1000}k" / mode / subset,
            mixture="mix_both" if noise else "mix_clean",
            sources=[f"s{number}" for number in range(1, speakers + 1)],
            sample_rate=sample_rate,
            seconds=seconds,
            data=f"Libri{speakers}Mix",
        )
