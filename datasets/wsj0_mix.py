"""WSJ0-2mix and WSJ0-3mix: mixtures of the Wall Street Journal's readers (Hershey et al., arXiv
1508.04306), as MERL's scripts generate them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.mixture_files import MixtureFiles

_SUBSETS = {"train": "tr", "valid": "cv", "test": "tt"}


@final
class WSJ0Mix(MixtureFiles):
    """Samples as `MixtureFiles`.

    Files are ROOT/Sspeakers/wavRk/MODE/{tr,cv,tt}/{mix,s1,s2,...}/*.wav, ROOT's first folder being
    optional.

    Args:
        root: Holds the folder 2speakers (or 3speakers), or is it.
        split: "train", "valid" or "test".
        speakers: S, how many speakers a mixture has, 2 or 3.
        sample_rate: 8000 or 16000 Hz.
        mode: "min": mixtures end with their shortest part; "max": with the longest.
        seconds: As in `MixtureFiles`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        speakers: Literal[2, 3] = 2,
        sample_rate: Literal[8000, 16000] = 8000,
        mode: Literal["min", "max"] = "min",
        seconds: float | None = None,
    ) -> None:
        given = Path(root).expanduser()
        folder = given if given.name == f"{speakers}speakers" else given / f"{speakers}speakers"
        super().__init__(
            folder / f"wav{sample_rate // 1000}k" / mode / _SUBSETS[split],
            mixture="mix",
            sources=[f"s{number}" for number in range(1, speakers + 1)],
            sample_rate=sample_rate,
            seconds=seconds,
            data=f"WSJ0-{speakers}mix",
        )
