"""Lists the files of a folder: samples by their endings, without the clutter of systems."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from samewise.datasets.parts.classes import require_count, require_known
from samewise.datasets.parts.file_kinds import another_kind
from samewise.datasets.parts.listings import Content, is_rubbish, listings
from samewise.runner.errors import DataError, Problem, did_you_mean, number_of

IMAGES = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    *(".jfif", ".jpe", ".gif", ".dib", ".pnm", ".pbm"),
)
"""Endings of image files: torchvision's list, and further ones of the supported formats."""
SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".au", ".m4a", ".aac")
"""Endings of recordings."""
VIDEOS = (".mp4", ".avi", ".mkv", ".mov", ".webm", ".m4v", ".mpg", ".mpeg")
"""Endings of videos."""
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
"""Endings of tables."""
ANNOTATIONS = (".xml",)
TENSORS = (".npy", ".pt", ".pth")
"""Endings of what numpy.save and torch.save write."""

_ARCHIVES = {".tar", ".tgz", ".gz", ".zip"}


class Files(NamedTuple):
    """Files below a folder.

    Args:
        names: Names with one of the endings, relative to the folder with "/" between folders,
            sorted by folder, then by name.
        other_counts: Numbers of other files, by ending.
    """

    names: list[str]
    other_counts: Counter[str]

    @property
    def left_out(self) -> str:
        """Description of the other files, for messages; empty if there are none."""
        return _summarise(self.other_counts)


def list_files(folder: str | os.PathLike[str], endings: Sequence[str]) -> Files:
    """List the files below a folder that end in one of `endings`, and count other files.

    Raises:
        DataError: Links lead to a folder twice, and it holds such files; or a folder cannot be
            read.
    """
    with listings(folder, endings) as content_of:
        return _list_files(folder, content_of)


def _list_files(
    folder: str | os.PathLike[str], content_of: Callable[[str, os.stat_result], Content]
) -> Files:
    paths, other_counts = list[tuple[str, str]](), Counter[str]()
    entered, repeated, pending = dict[tuple[int, int], str](), dict[str, str](), [""]
    while pending:
        below = pending.pop()
        path = os.path.join(folder, below)
        try:
            place = os.stat(path)
            # Each folder is entered once: thirty folders with two links in each to the next are a
            # billion paths
            first_path = entered.setdefault((place.st_dev, place.st_ino), below)
            if first_path != below:
                repeated[below] = first_path
                continue
            names, folders, counts = content_of(path, place)
        except OSError as error:
            raise DataError(
                Problem(
                    os.path.join(folder, below.rstrip("/")).rstrip("/"),
                    f"the folder cannot be read: {error.strerror}",
                )
            ) from None
        paths += [(below, name) for name in names.split("/") if name]
        pending += [f"{below}{name}/" for name in folders.split("/") if name]
        other_counts.update(counts)
    for below, first_path in sorted(repeated.items()):
        if any(x.startswith(first_path) for x, _ in paths):
            raise DataError(
                Problem(
                    os.path.join(folder, below.rstrip("/")),
                    f"is the same folder as {os.path.join(folder, first_path)}: its files would be "
                    "read twice",
                    hint="remove the link that leads there",
                )
            )
    return Files([below + name for below, name in sorted(paths)], other_counts)


def class_folders(folder: Path, *, content: str = "images") -> list[str]:
    """List the folders in a folder, sorted; a folder's place is its class's label.

    Args:
        folder: The folder.
        content: The noun for what the class folders hold, in messages.

    Raises:
        DataError: The folder cannot be read, or has no folders.
    """
    expected = f"a folder for each class, with its {content}"
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name for entry in entries if not is_rubbish(entry.name) and entry.is_dir()
            )
    except OSError as error:
        parent = folder.parent
        beside = (
            [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
        )
        reason = (
            "does not exist"
            if isinstance(error, FileNotFoundError)
            else f"the folder of {content} cannot be read: {error.strerror}"
        )
        present = next(path for path in (folder, *folder.parents) if path.exists())
        if description := another_kind(present, "folder"):
            raise DataError(
                Problem(
                    str(present),
                    f"is {description}, not a folder",
                    hint="unpack it" if "archive" in description else "set dataset.root=FOLDER",
                )
            ) from None
        raise DataError(
            Problem(str(folder), reason, expected=expected, hint=did_you_mean(folder.name, beside))
        ) from None
    if not names:
        files = list_files(folder, ())
        raise DataError(
            Problem(
                str(folder),
                f"has no class folders ({f'only {x}' if (x := files.left_out) else 'it is empty'})",
                expected=expected,
                hint="dataset=shards reads tar files as they are; others must be unpacked"
                if ".tar" in files.other_counts
                else "unpack the archives"
                if files.other_counts.keys() & _ARCHIVES
                else "",
            )
        )
    return names


def _summarise(counts: Counter[str]) -> str:
    """Return the numbers of files by their endings, for messages."""
    return ", ".join(
        number_of(count, f"{ending} file")
        if ending
        else f"{number_of(count, 'file')} without an ending"
        for ending, count in counts.most_common()
    )


class ClassFiles(NamedTuple):
    """Files in a split's class folders.

    Args:
        labels: Class numbers by file name, as CLASS/NAME.
        left_out: Description of other files in the folders; empty if there are none.
    """

    labels: dict[str, int]
    left_out: str


def list_by_class(
    folder: Path, classes: Sequence[str], *, endings: Sequence[str] = IMAGES
) -> ClassFiles:
    """List the files in a split's class folders; a class without a folder has no files."""
    labels, other_counts = dict[str, int](), Counter[str]()
    beside = (
        os.path.splitext(name)[1].lower() for name in os.listdir(folder) if not is_rubbish(name)
    )
    other_counts.update(ending for ending in beside if ending in endings)
    with listings(folder, endings) as content_of:
        for label, name in enumerate(classes):
            if (folder / name).is_dir():
                files = _list_files(folder / name, content_of)
                labels.update((f"{name}/{file}", label) for file in files.names)
                other_counts += files.other_counts
    return ClassFiles(labels, _summarise(other_counts))


def find_classes(
    base: Path,
    folder: str,
    *,
    classes_from: str | None,
    classes: Sequence[str] | None,
    num_classes: int | None,
    content: str = "images",
) -> list[str]:
    """Return the classes of a split's folders, by label.

    Args:
        base: The folder of the splits' folders.
        folder: The split's folder.
        classes_from: The folder whose folders name the classes; None: the split's own.
        classes: Class names in the order of their labels; None: the folders' names.
        num_classes: The expected number of classes; None allows any number.
        content: The noun for what the folders hold, in messages.

    Raises:
        DataError: The split has an unknown class, or the number of classes differs.
    """
    split_folder, class_source = (
        base / folder,
        base / (folder if classes_from is None else classes_from),
    )
    class_list = (
        list(map(str, classes))
        if classes is not None
        else class_folders(class_source, content=content)
    )
    require_known(
        str(split_folder),
        ((f"folder {name}", name) for name in class_folders(split_folder, content=content)),
        class_list,
    )
    require_count(str(split_folder), class_list, num_classes, kind="class folders")
    return class_list
