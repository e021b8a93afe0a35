"""LJSpeech: 24 hours of one reader at 22,050 Hz, as unpacked from its archive.

Source: Ito and Johnson 2017, The LJ Speech Dataset, https://keithito.com/LJ-Speech-Dataset.
"""

from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.clips import Clips
from samewise.datasets.parts.lists import read_lines
from samewise.datasets.parts.names import relative_names, require_listed
from samewise.datasets.parts.recordings import Cache, Recordings
from samewise.runner.errors import DataError, Problem, require_at_least

_ARCHIVE = "LJSpeech-1.1"


@final
class LJSpeech(Clips):
    """Samples of `Clips` from LJSpeech.

    A sample is `{"waveform": float32[samples + 2 * context], "name": str, "index": int}`. The files
    are ROOT/LJSpeech-1.1/wavs/*.wav, listed in metadata.csv.

    Args:
        root: The folder LJSpeech-1.1, or the folder that holds it.
        split: "train" or "valid"; the data set has no split of its own.
        samples, context: As in `Clips`.
        sample_rate: The waveforms' rate in Hz; the files have 22,050.
        valid_every: Distance between "valid" recordings: 10 takes each tenth; "train" has the rest.
        cache: "memory" keeps all recordings, decoded: 7 GB.

    Raises:
        DataError: The list or a recording is missing.
        ConfigError: `valid_every` is less than 2.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid"],
        samples: int,
        context: int,
        sample_rate: int = 22050,
        valid_every: int = 10,
        cache: Cache = "none",
    ) -> None:
        require_at_least({"dataset.valid_every": valid_every}, least=2)
        base = Path(root).expanduser()
        folder = base / _ARCHIVE if (base / _ARCHIVE).is_dir() else base
        try:
            lines = read_lines(folder / "metadata.csv")
        except OSError as error:
            raise DataError(
                Problem(
                    str(folder / "metadata.csv"),
                    f"LJSpeech was not found: {error.strerror}",
                    expected=_ARCHIVE,
                    hint="set dataset.root=FOLDER to where its archive was unpacked",
                )
            ) from None
        names = relative_names(
            folder / "wavs",
            [f"{line.partition('|')[0]}.wav" for line in lines],
            where=str(folder / "metadata.csv"),
        )
        require_listed(folder / "wavs", names, listed_in="metadata.csv")
        chosen = [
            name
            for number, name in enumerate(names, start=1)
            if (number % valid_every == 0) == (split == "valid")
        ]
        super().__init__(
            Recordings(folder / "wavs", chosen, sample_rate=sample_rate, cache=cache),
            samples=samples,
            context=context,
        )
