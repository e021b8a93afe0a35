"""Compares names: spellings in lists with those on the disk, and class names that look the same."""

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from samewise.runner.errors import DataError, Problem

_LATIN = str.maketrans("аеорсухіјѕԁһαορν", "aeopcyxijsdhaopv")  # noqa: RUF001
"""Cyrillic and Greek letters that look like Latin ones."""
_UNSEEN = dict.fromkeys((0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF))
"""The soft hyphen and characters without width."""


def compose(name: str) -> str:
    """Return the name with composed accents and single spaces: one form for equal names."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def looks(name: str) -> str:
    """Return a form that is equal for names that look the same, whatever their script and case."""
    letters = unicodedata.normalize("NFKC", name).translate(_UNSEEN).casefold().translate(_LATIN)
    return " ".join(letters.replace("_", " ").replace("-", " ").split())


def twin(name: str, names: Iterable[str]) -> str | None:
    """Return another name that looks the same; None if no other does."""
    look = looks(name)
    return next((x for x in names if x != name and looks(x) == look), None)


def difference(name: str, other: str) -> str:
    """Describe how the first name is spelt if the two look the same; else return an empty text."""
    if looks(name) != looks(other):
        return ""
    own_letters = [letter for letter in name if letter not in other] or list(name[len(other) :])
    points = [
        f"U+{ord(letter):04X} {unicodedata.name(letter, '')}".strip()
        for letter in dict.fromkeys(own_letters)
        if not (letter.isascii() and letter.isprintable()) or letter == " "
    ]
    return f" (spelt with {', '.join(points)})" if points else ""


def require_distinct(where: str, names: Iterable[str], *, what: str) -> None:
    """Raise a DataError if a name is blank, or two differ only in what cannot be seen, if at all.

    That is spaces, characters without width, and the Unicode form.
    """
    spellings = dict[str, str]()
    for name in names:
        form = compose(name.translate(_UNSEEN))
        DataError.raise_if(
            not form,
            where,
            f"has a {what} without a name",
            name,
            "a name for each",
        )
        if form in spellings:
            other_name = spellings[form]
            raise DataError(
                Problem(
                    where,
                    f"has two {what} names that look the same: "
                    f"{name!r}{difference(name, other_name)} "
                    f"and {other_name!r}{difference(other_name, name)}",
                    hint="correct one of them",
                )
            )
        spellings[form] = name


def relative_names(folder: Path, names: Iterable[str], *, where: str | None = None) -> list[str]:
    """Return listed names, relative to the folder if they lie inside.

    Splits and fingerprints depend on the result, so it is the same however a path is spelt:
    relative or absolute, through a link or with `..`.

    Args:
        folder: The folder that names are relative to.
        names: Names of files, as listed.
        where: The list, if it may name a file only once; None: sections of a file may be listed.

    Raises:
        DataError: A file is listed twice.
    """
    real, real_path = os.path.realpath(folder), lru_cache(maxsize=1 << 12)(os.path.realpath)

    def relative(name: str) -> str:
        if not name.startswith((os.sep, os.pardir)) and os.path.normpath(name) == name:
            return name
        path = folder / name
        inside = next((place for place in path.parents if real_path(place) == real), None)
        return name if inside is None else str(path.relative_to(inside))

    listed = list(map(relative, names))
    if where is not None:
        repeated = next((name for name, uses in Counter(listed).items() if uses > 1), None)
        DataError.raise_if(repeated, where, "lists a file twice", repeated, "each once")
    return listed


def require_listed(folder: Path, names: Sequence[str], *, listed_in: str) -> None:
    """Raise a DataError unless all listed files exist.

    Each folder is read once. The message names the cause if a file has nearly the missing name.
    """
    entries_of = lru_cache(maxsize=None)(_entries)
    missing = [
        name
        for name in names
        if os.path.basename(name) not in entries_of(os.path.join(folder, os.path.dirname(name)))
    ]
    if missing:
        also_missing = f", as are {len(missing) - 1} more" if len(missing) > 1 else ""
        raise DataError(
            Problem(
                str(folder / missing[0]),
                f"is listed in {listed_in} but missing{also_missing}",
                hint=_spelling(folder, missing[0])
                or (
                    "set dataset.root=FOLDER to the folder that the names are relative to"
                    if len(missing) == len(names)
                    else "download it again, or remove it from the list"
                ),
            )
        )


def _entries(folder: str | os.PathLike[str]) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    # ValueError: no file can have such a name
    except (OSError, ValueError):
        return frozenset()


def _spelling(folder: Path, name: str) -> str:
    """Describe how a missing file is spelt on the disk; empty if no name resembles it."""
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
    while folder in path.parent.parents and not path.parent.is_dir():
        path = path.parent
    entries = sorted(_entries(path.parent))
    if entry_name := twin(path.name, entries):
        return (
            f"the list has {path.name!r}{difference(path.name, entry_name)}, the folder "
            f"{entry_name!r}{difference(entry_name, path.name)}"
        )
    # A list of names without endings may have 0.jpg, which is looked for as 0.jpg.xml
    stems = {(stem := Path(slashed).stem), Path(stem).stem}
    entry_name = next((entry for entry in entries if Path(entry).stem in stems), None)
    return f"there is {entry_name}" if entry_name else ""
