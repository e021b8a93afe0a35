"""YesNo: sixty recordings of a man saying yes or no eight times in Hebrew.

They are transcribed in English. Source: https://www.openslr.org/1.
"""

from pathlib import Path
from typing import Literal, final

from torchaudio.datasets import YESNO

from samewise.datasets.parts.folders import list_files
from samewise.datasets.parts.recordings import Cache
from samewise.datasets.parts.torchvision_files import load
from samewise.datasets.parts.utterances import LETTERS, Spelling, Utterances
from samewise.runner.errors import DataError, require_at_least

_FOLDER = "waves_yesno"
_WORDS = {"0": "no", "1": "yes"}


@final
class YesNo(Utterances):
    """Samples of `Utterances` from YesNo.

    A sample is `{"waveform": float32[T], "length": T, "transcript": str, "name": str}`. A file
    named 0_1_1_0_0_1_1_1.wav says "no yes yes no no yes yes yes".

    Args:
        root: The folder that holds waves_yesno/*.wav.
        split: "train" or "valid".
        held_out: Size of the blocks whose last recording is "valid": 5 takes every fifth.
        download: Download the data set if it is missing: 5 MB.
        sample_rate: The waveforms' rate in Hz; the files have 8,000.
        letters, lowercase, ignore: As in `Spelling`.
        cache: As in `Utterances`.

    Raises:
        DataError: The data set is missing, or a file has an unexpected name.
        ConfigError: `held_out` is less than 2.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid"],
        held_out: int = 5,
        download: bool = False,
        sample_rate: int = 8000,
        letters: str = LETTERS,
        lowercase: bool = True,
        ignore: str = "",
        cache: Cache = "memory",
    ) -> None:
        require_at_least({"dataset.held_out": held_out}, least=2)
        load(
            YESNO,
            root=root,
            expected=f"the folder {_FOLDER}, with its 60 recordings",
            download=download,
        )
        folder = Path(root).expanduser() / _FOLDER
        chosen = [
            name
            for place, name in enumerate(list_files(folder, (".wav",)).names)
            if (place % held_out == held_out - 1) == (split == "valid")
        ]
        super().__init__(
            folder,
            chosen,
            [_transcript(folder, name) for name in chosen],
            sample_rate=sample_rate,
            spelling=Spelling(letters=letters, lowercase=lowercase, ignore=ignore),
            cache=cache,
        )


def _transcript(folder: Path, name: str) -> str:
    parts = Path(name).stem.split("_")
    DataError.raise_if(
        any(part not in _WORDS for part in parts),
        str(folder / name),
        "is not a recording of YesNo",
        expected="a name of zeros and ones, such as 0_1_1_0_0_1_1_1.wav",
    )
    return " ".join(_WORDS[part] for part in parts)
