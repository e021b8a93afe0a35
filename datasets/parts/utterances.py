"""Base of data sets of transcribed recordings: recordings, transcripts, and their spelling."""

import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from samewise.datasets.parts.audio_files import SoundSamples
from samewise.datasets.parts.names import difference
from samewise.datasets.parts.recordings import Cache, Recordings, Texts
from samewise.runner.errors import ConfigError, DataError, Problem, truncate

LETTERS = " 'abcdefghijklmnopqrstuvwxyz"
"""Space, apostrophe and alphabet: the letters of LibriSpeech's transcripts, in lower case."""


_DOTLESS = "\u0131"


class Spelling:
    """Normalisation of a transcript before it is split into letters.

    Args:
        letters: The allowed letters.
        lowercase: Convert capitals first.
        ignore: Characters to leave out, such as punctuation.

    Raises:
        ConfigError: The letters are empty, repeated, or not composed.
    """

    def __init__(self, *, letters: str = LETTERS, lowercase: bool = True, ignore: str = "") -> None:
        ConfigError.raise_if(
            len(set(letters)) != len(letters) or not letters,
            "dataset.letters",
            "must be distinct letters",
            letters,
        )
        composed = unicodedata.normalize("NFC", letters)
        ConfigError.raise_if(
            composed != letters,
            "dataset.letters",
            f"writes an accent apart from its letter{difference(letters, composed)}",
            letters,
            hint=f"transcripts are composed: write {composed!r}",
        )
        self.letters = frozenset(letters)
        self._shown = letters
        self._lowercase = lowercase
        # In alphabets with a dotless i, such as Turkish, it is the lower case of I
        self._capitals = str.maketrans({"I": _DOTLESS, "İ": "i"}) if _DOTLESS in letters else {}
        self._ignored = dict.fromkeys(map(ord, unicodedata.normalize("NFC", ignore)), None)

    def __call__(self, text: str, where: str) -> str:
        """Return the text with single spaces and composed accents; `where` names it in errors.

        Raises:
            DataError: The text has an unknown letter.
        """
        # An accent may be a character of its own
        composed = unicodedata.normalize("NFC", text)
        lowered = composed.translate(self._capitals).lower() if self._lowercase else composed
        text = " ".join(lowered.translate(self._ignored).split())
        unknown = next((letter for letter in text if letter not in self.letters), None)
        if unknown is not None:
            hint = (
                "add it to dataset.letters, or to dataset.ignore; the transcript is "
                f"{truncate(text, 60, ending='…')!r}"
            )
            if self._lowercase and unknown.upper() in self.letters:
                keep = "+dataset.train.lowercase=false +dataset.valid.lowercase=false"
                written = (
                    f"the transcript is {truncate(composed, 60, ending='…')!r} in the file, and "
                    "is made lower case first"
                )
                hint = f"{written}: give dataset.letters in lower case, or set {keep}"
            raise DataError(
                Problem(
                    where,
                    "the transcript has an unknown letter, "
                    f"{unicodedata.name(unknown, 'without a name')}",
                    unknown,
                    self._shown,
                    hint,
                )
            )
        return text


class Utterances(SoundSamples):
    """Samples `{"waveform": float32[T], "length": T, "transcript": str, "name": str}`.

    A subclass lists the files.

    Args:
        folder: The folder that the names are relative to.
        names: File names, with "/" between folders.
        transcripts: A transcript for each file.
        sample_rate: The waveforms' rate in Hz; files at another rate are resampled.
        spelling: Normalises the transcripts; all are checked at the start.
        cache: "memory" decodes all recordings once, at the start, and keeps them.
        sections: (start, length) in seconds of each recording in its file, as in `Recordings`.
        whole_within: Tolerance in seconds of whole files, as in `Recordings`.

    Raises:
        DataError: A transcript has an unknown letter; there are no files; or, with cache="memory",
            a file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        transcripts: Sequence[str],
        *,
        sample_rate: int,
        spelling: Spelling,
        cache: Cache = "none",
        sections: Sequence[tuple[float, float]] | None = None,
        whole_within: float | None = None,
    ) -> None:
        self.sample_rate = sample_rate
        self._transcripts = Texts(
            [
                spelling(text, str(folder / name))
                for name, text in zip(names, transcripts, strict=True)
            ]
        )
        self._recordings = Recordings(
            folder,
            names,
            sample_rate=sample_rate,
            cache=cache,
            sections=sections,
            whole_within=whole_within,
        )

    def __len__(self) -> int:
        return len(self._recordings)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample(self.waveform(index), self.transcript(index), self.name(index))

    def fields(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return a sample's key, and its fields as a shard has them."""
        return self._recordings.fields(index, text=self.transcript(index))

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        return self._recordings.path(index)

    def name(self, index: int) -> str:
        """Return the file of a sample, as listed."""
        return self._recordings.names[index]

    def transcript(self, index: int) -> str:
        """Return a recording's normalised transcript."""
        return self._transcripts[index]

    def waveform(self, index: int) -> Tensor:
        """Return float32[T] of a recording, at `sample_rate`."""
        return self._recordings.stretch(index)

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover the recordings and the transcripts."""
        digest = blake2b(self._recordings.fingerprint().encode(), digest_size=16)
        digest.update(self._transcripts.block)
        digest.update(self._transcripts.ends)
        return digest.hexdigest()


def sample(waveform: Tensor, transcript: str, name: str) -> dict[str, Any]:
    """Return the sample that every data set of utterances returns."""
    return {"waveform": waveform, "length": len(waveform), "transcript": transcript, "name": name}
