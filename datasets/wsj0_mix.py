"""WSJ0-2mix and WSJ0-3mix: mixtures of the Wall Street Journal's readers, by MERL's scripts.

Source: Hershey et al. 2016, Deep clustering, arXiv 1508.04306.
"""

from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.mixture_files import MixtureFiles


@final
class WSJ0Mix(MixtureFiles):
    """Samples of `MixtureFiles` from WSJ0-2mix or WSJ0-3mix.

    A sample is `{"mixture": float32[T], "sources": float32[S, T], "length": T, "name": str}`. The
    files are ROOT/Sspeakers/wavRk/MODE/{tr,cv,tt}/{mix,s1,s2,...}/*.wav.

    Args:
        root: The folder 2speakers (or 3speakers), or the folder that holds it.
        split: "train", "valid" or "test".
        speakers: S, the number of speakers in a mixture, 2 or 3.
        sample_rate: Sample rate of the files in Hz, 8000 or 16000.
        mode: "min": a mixture ends with its shortest part; "max": with its longest.
        seconds: As in `MixtureFiles`.

    Raises:
        DataError: As in `MixtureFiles`.
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
        base = Path(root).expanduser()
        folder = base if base.name == f"{speakers}speakers" else base / f"{speakers}speakers"
        super().__init__(
            folder
            / f"wav{sample_rate // 1000}k"
            / mode
            / {"train": "tr", "valid": "cv", "test": "tt"}[split],
            mixture="mix",
            sources=[f"s{number}" for number in range(1, speakers + 1)],
            sample_rate=sample_rate,
            seconds=seconds,
            data=f"WSJ0-{speakers}mix",
        )
