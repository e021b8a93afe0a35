"""The user's recordings, listed in a file with their transcripts: CSV, TSV or JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from samewise.datasets.parts.delimited import delimited_rows
from samewise.datasets.parts.limits import require_regular
from samewise.datasets.parts.recordings import Cache
from samewise.datasets.parts.utterances import LETTERS, Spelling, Utterances, require_files
from samewise.runner.errors import DataError, Problem, nearest

_ROUNDED = 0.1
"""Seconds by which a recording may be longer than its listed duration."""


@final
class Manifest(Utterances):
    """Samples as `Utterances`, from a file with one line per recording, or per section of one.

    As in NeMo's manifests, a line means `duration` seconds of its recording from `offset` (0 by
    default) on. If no line has an `offset` other than 0, lines may list their recordings' whole
    durations, rounded: one that is not shorter than its recording by more than 0.1 s, or is 0 or
    left out, means all of it.

    Args:
        file: NAME.csv or NAME.tsv with a first line of column names, or NAME.jsonl with an object a
            line. Texts in a .csv may be in quotes; in a .tsv quotes are characters, as in Common
            Voice's.
        audio: The column of the recordings' paths.
        text: The column of their transcripts.
        root: What the paths are relative to; None: the file's folder.
        sample_rate: In Hz; other rates are resampled.
        letters, lowercase, ignore: As in `Spelling`.
        cache: As in `Utterances`.

    Raises: DataError: the file is not there or not a list of recordings, a recording is missing, a
        transcript has an unknown letter, a section has no valid times.
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
        names, transcripts, sections = list[str](), list[str](), list[tuple[float, float]]()
        for number, row in _rows(path):
            names.append(_value(path, number, row, audio))
            transcripts.append(_value(path, number, row, text))
            sections.append(
                (_seconds(path, number, row, "offset"), _seconds(path, number, row, "duration"))
            )
        require_files(folder, names, listed_in=path.name)
        spelling = Spelling(letters=letters, lowercase=lowercase, ignore=ignore)
        within = None if _has_offsets(path, sections) else _ROUNDED
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


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The number of each line (from 1) and its values by column."""
    try:
        require_regular(path)
        with open(path, encoding="utf-8-sig", newline="") as handle:
            if path.suffix.lower() in (".jsonl", ".json"):
                for number, line in enumerate(handle, start=1):
                    if line.strip():
                        yield number, _object(path, number, line)
            else:
                tabs = path.suffix.lower() == ".tsv"  # where quotes are part of a text
                yield from delimited_rows(
                    path, handle, delimiter="\t" if tabs else ",", quotes=not tabs, each="recording"
                )
    except OSError as error:
        reason = f"the list of recordings cannot be read: {error.strerror}"
        raise DataError(
            Problem(str(path), reason, hint="set dataset.train_file and dataset.valid_file")
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            Problem(
                str(path),
                f"is not a list of recordings: {error}",
                expected="a CSV, TSV or JSON-lines file in UTF-8",
            )
        ) from None


def _object(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(Problem(f"{path}:{number}", f"is not JSON: {error}")) from None
    if not isinstance(row, dict):
        raise DataError(Problem(f"{path}:{number}", "is not a JSON object", row))
    return row


def _has_offsets(path: Path, sections: list[tuple[float, float]]) -> bool:
    """Whether any section begins within its recording; DataError if one then has no duration."""
    if not any(offset for offset, _ in sections):
        return False
    if without := sum(not duration for _, duration in sections):
        words = (
            f"has sections of recordings (offset), and {without} of its {len(sections)} lines "
            "have no duration"
        )
        raise DataError(Problem(str(path), words, expected="a duration in seconds in each line"))
    return True


def _seconds(path: Path, number: int, row: Mapping[str, Any], column: str) -> float:
    value = row.get(column)
    with suppress(TypeError, ValueError):
        if not isinstance(value, bool) and 0 <= (seconds := float(value or 0.0)) < 1e9:
            return seconds
    raise DataError(Problem(f"{path}:{number}", f"has an invalid {column}", value, "seconds"))


def _value(path: Path, number: int, row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        hint = nearest(column, list(row)) if column not in row else ""
        raise DataError(
            Problem(
                f"{path}:{number}",
                f"has no text in the column {column!r}",
                expected=f"the columns {', '.join(map(str, row))}",
                hint=hint,
            )
        )
    return value
