"""Compares names: of files that lists spell otherwise than the disk, and of classes that look the
same.
"""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from samewise.runner.errors import DataError, Problem

_LATIN = str.maketrans("аеорсухіјѕԁһαορν", "aeopcyxijsdhaopv")  # noqa: RUF001
"""Cyrillic and Greek letters that look like Latin ones."""
_UNSEEN = dict.fromkeys((0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF))
"""The soft hyphen and characters without width."""


def compose(name: str) -> str:
    """Return the name with composed accents and single spaces: equal for canonically equal names."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def looks(name: str) -> str:
    """Return what names of one look have in common, whatever their letters' script and case."""
    seen = unicodedata.normalize("NFKC", name).translate(_UNSEEN).casefold().translate(_LATIN)
    return " ".join(seen.replace("_", " ").replace("-", " ").split())


def first_repeated(names: Iterable[str]) -> str | None:
    """Return a name that occurs more than once; None if all differ."""
    return next((name for name, uses in Counter(names).items() if uses > 1), None)


def twin(name: str, names: Iterable[str]) -> str | None:
    """Return another name that looks the same; None if there is none."""
    look = looks(name)
    return next((other for other in names if other != name and looks(other) == look), None)


def difference(name: str, other: str) -> str:
    """Describe how the first name is spelt where the two may look the same; else it is empty."""
    if looks(name) != looks(other):
        return ""
    own = [letter for letter in name if letter not in other] or list(name[len(other) :])
    points = [
        f"U+{ord(letter):04X} {unicodedata.name(letter, '')}".strip()
        for letter in dict.fromkeys(own)
        if not (letter.isascii() and letter.isprintable()) or letter == " "
    ]
    return f" (spelt with {', '.join(points)})" if points else ""


def misspelt(names: Sequence[str], counts: Mapping[str, int]) -> list[tuple[str, list[str]]]:
    """Return names that may be misspelt, each with the similar ones, the most suspect first.

    These are names that look the same and, where it is known how often each occurs, rare ones
    beside frequent ones that are similar.
    """
    look = {name: looks(name) for name in names}
    found = list[tuple[str, list[str], bool]]()
    for name in names:
        others = [
            other
            for other in names
            if other != name and (not counts or counts[name] <= counts[other])
        ]
        twins = [other for other in others if look[other] == look[name]]
        # One slip among four or more, ten among hundreds
        common = [other for other in others if counts and 4 * counts[name] ** 2 <= counts[other]]
        if alike := twins or sorted(get_close_matches(name, common, 2)):
            found.append((name, alike, bool(twins)))
    found.sort(key=lambda entry: (not entry[2], counts.get(entry[0], 0)))
    return [(name, alike) for name, alike, _ in found]


def require_distinct(where: str, names: Iterable[str], *, what: str) -> None:
    """Raise a DataError if a name is blank, or two differ only in spaces or Unicode form."""
    known = dict[str, str]()
    for name in names:
        form = compose(name)
        if not form:
            raise DataError(Problem(where, f"has a {what} without a name", name, "a name for each"))
        if (other := known.setdefault(form, name)) != name:
            reason = (
                f"has two {what} names that look the same: {name!r}{difference(name, other)} and "
                f"{other!r}{difference(other, name)}"
            )
            raise DataError(Problem(where, reason, hint="write both in one way"))


def relative_to(folder: Path) -> Callable[[str], str]:
    """Return a function from a listed name to the name relative to the folder, if it is inside.

    However the folder is spelt, relative or absolute, through a link or with `..`, the result is
    the same: splits and fingerprints depend on it.
    """
    real, real_path = os.path.realpath(folder), lru_cache(maxsize=1 << 12)(os.path.realpath)

    def relative(name: str) -> str:
        if not os.path.isabs(name):
            return name
        path = Path(name)
        inside = next((place for place in path.parents if real_path(place) == real), None)
        return name if inside is None else str(path.relative_to(inside))

    return relative


def require_listed(folder: Path, names: Sequence[str], *, listed_in: str) -> None:
    """Raise a DataError unless all listed files exist.

    Each folder is read once. The message names the cause where a file of nearly that name exists.
    """
    there = lru_cache(maxsize=None)(_entries)
    missing = [
        name
        for name in names
        if os.path.basename(name) not in there(os.path.join(folder, os.path.dirname(name)))
    ]
    if missing:
        others = f", as are {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = _spelling(folder, missing[0]) or (
            "set dataset.root=FOLDER to the folder that the names are relative to"
            if len(missing) == len(names)
            else "download it again, or remove it from the list"
        )
        reason = f"is listed in {listed_in} but missing{others}"
        raise DataError(Problem(str(folder / missing[0]), reason, hint=hint))


def _entries(folder: str | os.PathLike[str]) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


def _spelling(folder: Path, name: str) -> str:
    """Say how a missing file is spelt on the disk; empty if there is none like it."""
    slashed = name.replace("\\", "/")
    path = folder / slashed
    if slashed != name and path.is_file():
        return f"write '/' between folders, not '\\': {slashed}"
    if slashed.startswith(f"{folder.name}/") and (folder.parent / slashed).is_file():
        also = " with '/' between folders" if slashed != name else ""
        return (
            f"the name begins with the folder {folder.name}, to which it is relative: write "
            f"{slashed.removeprefix(f'{folder.name}/')}{also}"
        )
    entries = sorted(_entries(path.parent))
    if other := twin(path.name, entries):
        return (
            f"the list has {path.name!r}{difference(path.name, other)}, the folder "
            f"{other!r}{difference(other, path.name)}"
        )
    other = next((entry for entry in entries if Path(entry).stem == path.stem), None)
    return f"there is {other}" if other else ""
