"""Recordings listed in a file with their transcripts: CSV, TSV or JSON lines."""

from contextlib import suppress
from pathlib import Path
from typing import final

from samewise.datasets.parts.lists import Row, read_rows
from samewise.datasets.parts.names import relative_names, require_listed
from samewise.datasets.parts.recordings import Cache
from samewise.datasets.parts.utterances import LETTERS, Spelling, Utterances
from samewise.runner.errors import DataError, Problem

_ROUNDED = 0.1
"""Seconds by which a recording may be longer or shorter than its listed duration."""


@final
class Manifest(Utterances):
    """Samples of `Utterances` from a file with one line for each recording, or section of one.

    A sample is `{"waveform": float32[T], "length": T, "transcript": str, "name": str}`.

    As in NeMo's manifests, a line selects `duration` seconds of its recording from `offset` (0 by
    default) on. If no line has an `offset` other than 0, the durations may be those of whole
    recordings, rounded: a line then selects the whole recording if its duration is 0, missing, or
    differs from the recording's by at most 0.1 s.

    Args:
        file: NAME.csv or NAME.tsv with column names in the first line, or NAME.jsonl with an object
            in each line. Texts in a .csv may be in quotes; in a .tsv quotes are characters, as in
            Common Voice.
        audio: The column of the recordings' paths.
        text: The column of their transcripts.
        root: The folder that the paths are relative to; None: the file's folder.
        sample_rate: The waveforms' rate in Hz; recordings at another rate are resampled.
        letters, lowercase, ignore: As in `Spelling`.
        cache: As in `Utterances`.

    Raises:
        DataError: The file does not exist or is not a list of recordings, a recording is missing, a
            transcript has an unknown letter, or a section has no valid times or ends after its
            recording.
    """

    def __init__(
        self,
        *,
        file: str,
        audio: str = "audio",
        text: str = "text",
        root: str | None = None,
        sample_rate: int = 16000,
        letters: str = LETTERS,
        lowercase: bool = True,
        ignore: str = "",
        cache: Cache = "none",
    ) -> None:
        path = Path(file).expanduser()
        folder = path.parent if root is None else Path(root).expanduser()
        # In Common Voice's tables, quotes are characters
        rows = read_rows(
            path,
            (audio, text, "offset", "duration"),
            item="recording",
            setting="dataset.train_file and dataset.valid_file",
            tab_quotes=False,
        )
        names = relative_names(folder, [row.text(audio, setting="audio") for row in rows])
        transcripts = [row.text(text, setting="text", blank=True) for row in rows]
        sections = [(_seconds(row, "offset"), _seconds(row, "duration")) for row in rows]
        require_listed(folder, names, listed_in=path.name)
        spelling = Spelling(letters=letters, lowercase=lowercase, ignore=ignore)
        within = None if any(offset for offset, _ in sections) else _ROUNDED
        listed = sections if any(map(any, sections)) else None
        super().__init__(
            folder,
            names,
            transcripts,
            sample_rate=sample_rate,
            spelling=spelling,
            cache=cache,
            sections=listed,
            whole_within=within,
        )


def _seconds(row: Row, column: str) -> float:
    value = row.values.get(column)
    with suppress(TypeError, ValueError):
        # float(True) is 1
        if not isinstance(value, bool) and 0 <= (seconds := float(value or 0.0)) < 1e9:
            return seconds
    raise DataError(Problem(row.where, f"has an invalid {column}", value, "seconds"))
