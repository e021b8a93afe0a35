"""Lists the files of a folder: which of them are samples, and which are the rubbish of others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from samewise.datasets.parts.classes import require_count
from samewise.runner.errors import DataError, Problem, did_you_mean

IMAGES = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    *(".jfif", ".jpe", ".gif", ".dib", ".pnm"),
)
"""The file names that are images: torchvision's list, and further ones of the formats that are
read."""
SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".au", ".m4a", ".aac")
"""The file names that are recordings."""
VIDEOS = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg")
"""The file names that are videos."""
ANNOTATIONS = (".xml",)

_RUBBISH = {
    *("__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information"),
    *("lost+found", "thumbs.db", "desktop.ini", "ehthumbs.db"),
}
"""What operating systems and disk stations leave in folders, beside names that begin with "."."""


class Files(NamedTuple):
    """The files below a folder.

    Args:
        names: Those with one of the endings, relative to the folder with "/" between folders,
            sorted by folder, then by name.
        others: How many others there are, by ending.
    """

    names: list[str]
    others: Counter[str]


def is_rubbish(name: str) -> bool:
    """Whether an entry of a folder is nobody's sample or class: hidden, or left by a system."""
    return name.startswith(".") or name.lower() in _RUBBISH


def list_files(folder: str | os.PathLike[str], endings: Sequence[str]) -> Files:
    """List the files below a folder that end in one of `endings`, and count the others.

    Links to folders are followed, each folder once: thirty folders with two links in each to the
    next are a billion paths.

    Raises:
        DataError: Links lead to a folder twice, and it holds such files; or a folder cannot be
            read.
    """
    found, others = list[tuple[str, str]](), Counter[str]()
    entered, again, waiting = dict[tuple[int, int], str](), dict[str, str](), [""]
    while waiting:
        below = waiting.pop()
        try:
            place = os.stat(os.path.join(folder, below))
            first = entered.setdefault((place.st_dev, place.st_ino), below)
            if first != below:
                again[below] = first
                continue
            with os.scandir(os.path.join(folder, below)) as entries:
                for entry in entries:
                    if is_rubbish(entry.name):
                        continue
                    # Following links to images would ask the disk for each
                    if entry.name.lower().endswith(tuple(endings)) and not entry.is_dir(
                        follow_symlinks=False
                    ):
                        found.append((below, entry.name))
                    elif entry.is_dir():
                        waiting.append(f"{below}{entry.name}/")
                    else:
                        others[os.path.splitext(entry.name)[1].lower()] += 1
        except OSError as error:
            where = os.path.join(folder, below.rstrip("/"))
            reason = f"the folder cannot be read: {error.strerror}"
            hint = "" if below else "set dataset.root=FOLDER"
            raise DataError(Problem(where.rstrip("/"), reason, hint=hint)) from None
    for below, first in sorted(again.items()):
        if any(inside.startswith(first) for inside, _ in found):
            where = os.path.join(folder, below.rstrip("/"))
            reason = (
                f"is the same folder as {os.path.join(folder, first)}: its files would be read "
                "twice"
            )
            raise DataError(Problem(where, reason, hint="remove the link that leads there"))
    return Files([below + name for below, name in sorted(found)], others)


def class_folders(folder: Path, *, of: str = "images") -> list[str]:
    """Return the folders in a folder, sorted: their places are the labels.

    Raises:
        DataError: The folder does not exist.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(
                entry.name for entry in entries if not is_rubbish(entry.name) and entry.is_dir()
            )
    except OSError as error:
        parent = folder.parent
        beside = (
            [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
        )
        missing = (
            f"{parent} has no folder {folder.name}"
            if parent.is_dir() and not folder.exists()
            else "set dataset.root=FOLDER"
        )
        reason = f"the folder of {of} cannot be read: {error.strerror}"
        expected = f"a folder for each class, with its {of}"
        hint = did_you_mean(folder.name, beside) or missing
        raise DataError(Problem(str(folder), reason, expected=expected, hint=hint)) from None


class ClassFiles(NamedTuple):
    """The files in a split's class folders.

    Args:
        labels: By the file's name, as CLASS/NAME, the number of its class.
        left_out: What else the folders hold, in words; empty if there is nothing.
    """

    labels: dict[str, int]
    left_out: str


def list_by_class(
    folder: Path, classes: Sequence[str], *, endings: Sequence[str] = IMAGES
) -> ClassFiles:
    """List the files in a split's class folders; a class without a folder has none."""
    labels, others = dict[str, int](), Counter[str]()
    for label, name in enumerate(classes):
        if (folder / name).is_dir():
            files = list_files(folder / name, endings)
            labels |= {f"{name}/{file}": label for file in files.names}
            others += files.others
    counted = [f"{count} {ending or 'without an ending'}" for ending, count in others.most_common()]
    return ClassFiles(labels, ", ".join(counted))


def find_classes(
    base: Path,
    folder: str,
    *,
    classes_from: str | None,
    classes: Sequence[str] | None,
    num_classes: int | None,
    of: str = "images",
) -> list[str]:
    """Return the classes of a split's folders, by label.

    Args:
        base: The folder with the splits' folders in it.
        folder: The split's folder.
        classes_from: The folder whose folders name the classes; None: the split's.
        classes: The classes' names in the order of their labels; None: by the folders.
        num_classes: How many there should be; None: as many as there are.
        of: What the folders hold.

    Raises:
        DataError: The split has others, or there are more or fewer.
    """
    here, named = base / folder, base / (folder if classes_from is None else classes_from)
    known = list(map(str, classes)) if classes is not None else class_folders(named, of=of)
    if unknown := sorted(set(class_folders(here, of=of)) - set(known)):
        reason = "has classes that the training split does not have"
        expected = f"some of: {', '.join(known[:20])}"
        raise DataError(Problem(str(here), reason, unknown, expected))
    require_count(str(here), known, num_classes, of="class folders")
    return known
