"""LibriSpeech: a thousand hours of read English, as unpacked from its archives.

Source: Panayotov et al. 2015, LibriSpeech: an ASR corpus based on public domain audio books,
ICASSP, https://www.openslr.org/12.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import final

from samewise.datasets.parts.folders import list_files
from samewise.datasets.parts.lists import read_lines
from samewise.datasets.parts.names import relative_names, require_listed
from samewise.datasets.parts.recordings import Cache
from samewise.datasets.parts.torchvision_files import load
from samewise.datasets.parts.utterances import LETTERS, Spelling, Utterances
from samewise.runner.errors import ConfigError, DataError, nearest

SUBSETS = (
    "dev-clean",
    "dev-other",
    "test-clean",
    "test-other",
    "train-clean-100",
    "train-clean-360",
    "train-other-500",
)

_ARCHIVE = "LibriSpeech"


@final
class LibriSpeech(Utterances):
    """Samples of `Utterances` from LibriSpeech.

    A sample is `{"waveform": float32[T], "length": T, "transcript": str, "name": str}`. The files
    are ROOT/LibriSpeech/SUBSET/SPEAKER/CHAPTER/*.flac, with a file of transcripts for each chapter.

    Args:
        root: The folder LibriSpeech, or the folder that holds it.
        subsets: One or several of `SUBSETS`, in this order.
        download: Download missing subsets, by torchaudio: dev-clean has 337 MB, all training sets
            have 60 GB.
        sample_rate: The waveforms' rate in Hz; the files have 16,000.
        letters, lowercase, ignore: As in `Spelling`.
        cache: As in `Utterances`.

    Raises:
        DataError: A subset or one of its files is missing, or a transcript has an unknown letter.
        ConfigError: The subset is unknown.
    """

    def __init__(
        self,
        *,
        root: str,
        subsets: Sequence[str],
        download: bool = False,
        sample_rate: int = 16000,
        letters: str = LETTERS,
        lowercase: bool = True,
        ignore: str = "",
        cache: Cache = "none",
    ) -> None:
        for subset in subsets:
            ConfigError.raise_if(
                subset not in SUBSETS,
                "dataset.subsets",
                "LibriSpeech has no such part",
                subset,
                ", ".join(SUBSETS),
                nearest(subset, SUBSETS),
            )
        folder = _folder(Path(root).expanduser(), subsets, download=download)
        listed = [line for subset in subsets for line in _list_utterances(folder, subset)]
        super().__init__(
            folder,
            [name for name, _ in listed],
            [transcript for _, transcript in listed],
            sample_rate=sample_rate,
            spelling=Spelling(letters=letters, lowercase=lowercase, ignore=ignore),
            cache=cache,
        )


def _folder(root: Path, subsets: Sequence[str], *, download: bool) -> Path:
    """Return the folder that contains all subsets."""
    if not (root / _ARCHIVE).is_dir() and any((root / subset).is_dir() for subset in subsets):
        return root
    folder = root / _ARCHIVE
    for subset in subsets:
        if (folder / subset).is_dir():
            continue
        DataError.raise_if(
            not download,
            str(folder / subset),
            "this part of LibriSpeech was not found",
            expected="its archive, unpacked",
            hint="set dataset.root=FOLDER to where it is, or dataset.download=true to download it",
        )
        from torchaudio.datasets import LIBRISPEECH

        load(
            partial(LIBRISPEECH, url=subset),
            root=str(root),
            expected=f"the folder {_ARCHIVE}/{subset}",
            download=True,
        )
    return folder


def _list_utterances(folder: Path, subset: str) -> list[tuple[str, str]]:
    """List (file, transcript) of a subset, by speaker and chapter in numerical order."""
    # torchaudio's `get_metadata` reads a chapter's transcripts anew for each of its utterances
    utterances = list[tuple[str, str]]()
    for listing in sorted(
        (folder / subset / name for name in list_files(folder / subset, (".trans.txt",)).names),
        # Numbers without leading zeros sort by their length first
        key=lambda path: [(len(part), part) for part in path.parts[-3:-1]],
    ):
        chapter = listing.parent.relative_to(folder).as_posix()
        lines = [line.partition(" ") for line in read_lines(listing)]
        names = relative_names(
            listing.parent, [f"{name}.flac" for name, _, _ in lines], where=str(listing)
        )
        require_listed(listing.parent, names, listed_in=listing.name)
        utterances += [
            (f"{chapter}/{name}", transcript)
            for name, (_, _, transcript) in zip(names, lines, strict=True)
        ]
    return utterances
