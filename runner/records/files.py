"""Files of runs and sweeps: written completely or not at all; errors of reading name the damage.

Imports neither torch nor mlflow.
"""

import errno
import hashlib
import itertools
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from samewise.runner.errors import (
    ConfigError,
    DamagedFile,
    Problem,
    TrainingError,
    first_line,
    make_room,
)
from samewise.runner.records.json_text import respelled
from samewise.runner.records.shapes import describe_misfit, with_numbers

LARGEST = 64 << 20
"""Maximum size in bytes of a file that is read whole, and of a line of a file that is read by
lines."""


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader, even after a crash, sees either the old content or the new.

    Raises:
        TrainingError: The disk is full or the file cannot be written; the old content is still
            there.
    """
    # In the same folder, since a rename does not leave its disk
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    raw = data.encode() if isinstance(data, str) else data
    try:
        # A killed process of the same number may have left it
        temporary.unlink(missing_ok=True)
        # "x" does not write through a link that someone else has made
        with open(temporary, "xb") as handle:
            handle.write(raw)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        # Without this a crash may undo the rename
        fsync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        remedy = make_room(error.errno, path) or "check the storage and the permissions"
        raise TrainingError(
            Problem(
                str(path),
                f"cannot be written: {error.strerror}",
                hint=f"{remedy}, then run the same command again",
            )
        ) from None


def fsync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(
        place for place in (folder.absolute(), *folder.absolute().parents) if place.exists()
    )


def try_writing(folder: Path) -> str:
    """Return the reason that nothing can be written to a folder, or "" if it can.

    Tests the nearest existing parent of a folder that does not exist.
    """
    # By a trial write, since permissions do not show a read-only file system
    try:
        with tempfile.TemporaryFile(dir=nearest_existing(folder)):
            return ""
    except OSError as error:
        return str(error.strerror)


def require_writable(option: str, place: Path, *, file: bool = False, hint: str = "") -> None:
    """Raise a ConfigError if a place cannot be written, before the work whose result goes there.

    Args:
        option: The option that names the place: `--output`.
        place: A folder, which may not exist yet; with `file`, a file in an existing folder.
        file: Whether the place is a file.
        hint: The message's hint if the file's folder does not exist, or nothing can be written.
    """
    folder = place.absolute().parent if file else place
    ConfigError.raise_if(
        file and not folder.is_dir(),
        option,
        "is in a folder that does not exist",
        str(place),
        "a file in an existing folder",
        hint,
    )
    ConfigError.raise_if(
        (refusal := try_writing(folder)),
        option,
        f"cannot be written: {refusal}",
        str(place),
        "a place that you can write to",
        hint,
    )


def require_no_link(*paths: Path) -> None:
    """Raise DamagedFile if a path is a link.

    In a received folder it may lead to any file of the user's.
    """
    if link := next((path for path in paths if path.is_symlink()), None):
        raise damaged_file(link, "it is a link, which may lead to any file of yours")


def files_below(folder: Path, *, hidden: bool) -> Iterator[Path]:
    """Yield the files below a folder, in a fixed order.

    Links are followed. Each folder is entered once: thirty nested folders with two links each to
    the next have a billion paths.

    Args:
        folder: The folder.
        hidden: Whether hidden files and folders, and Python's caches, are included.
    """
    entered = set[str]()
    for path, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        shown = [x for x in folders if hidden or not (x.startswith(".") or x == "__pycache__")]
        # In place: os.walk goes only into the folders that are left in its list
        folders[:] = [] if real in entered else sorted(shown)
        if real not in entered:
            files = (Path(path, x) for x in sorted(names) if hidden or not x.startswith("."))
            yield from (file for file in files if file.is_file())
        entered.add(real)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file or folder that is in the way and may contain work; return its new path.

    The new name is WHY-NAME, or WHY-NAME-2 and so on.
    """
    names = (
        f"{why}-{path.name}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1)
    )
    target = next(place for place in map(path.with_name, names) if not os.path.lexists(place))
    path.rename(target)
    return target


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically.

    NaN and the infinities, which JSON lacks, become the strings of `shapes.NUMBER`.
    """
    write_atomically(
        path, json.dumps(respelled(value, json.dumps), indent=2, allow_nan=False) + "\n"
    )


def open_to_read(path: Path) -> BufferedReader | None:
    """Open a file of a run or sweep; None if it does not exist.

    Raises:
        DamagedFile: It is a pipe or a device, which is not waited for.
        ConfigError: It cannot be read now.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for someone to write to it
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return open(handle, "rb")
    os.close(handle)
    is_folder = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise (
        _unreadable(path, is_folder)
        if stat.S_ISDIR(kind)
        else damaged_file(path, "it is not a regular file")
    )


def require_downloaded(path: Path) -> None:
    """Raise a ConfigError if an existing file is empty, a Git LFS pointer or a web page."""
    with open(path, "rb") as handle:
        start = handle.read(1024).lstrip().lower()
    ConfigError.raise_if(not start, str(path), "is empty")
    ConfigError.raise_if(
        start.startswith(b"version https://git-lfs"),
        str(path),
        "is a Git LFS pointer, not the file that it stands for",
        hint="`git lfs pull` in its repository gets the file",
    )
    ConfigError.raise_if(
        start.startswith((b"<!doctype html", b"<html", b"<?xml")),
        str(path),
        "is a web page, such as a login or an error, in the place of the file",
        hint="download it again",
    )


def sha256(path: Path) -> str:
    """Return the SHA-256 of an existing file, in hexadecimal."""
    handle = open_to_read(path)
    if handle is None:
        raise FileNotFoundError(path)
    with handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_text(path: Path) -> str | None:
    """Return the text of a file; None if it does not exist.

    Raises:
        DamagedFile: It is larger than `LARGEST`, not UTF-8, or a pipe.
        ConfigError: It cannot be read now.
    """
    handle = open_to_read(path)
    if handle is None:
        return None
    with handle:
        try:
            # One byte more shows that the file is too large
            raw = handle.read(min(os.fstat(handle.fileno()).st_size, LARGEST) + 1)
        except OSError as error:
            raise _unreadable(path, error) from None
    if len(raw) > LARGEST:
        raise damaged_file(path, f"it is larger than {LARGEST >> 20} MiB")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise damaged_file(path, f"it is not UTF-8 text (byte {error.start})") from None


def read_json(path: Path, shape: Any = object) -> Any:
    """Return the value in a file, checked against a shape of `shapes`; None if there is no file.

    An empty file is damaged, not missing.

    Raises:
        DamagedFile: It is not JSON, or of another shape.
        ConfigError: It cannot be read now.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        value = parse_json(text)
    except ValueError as error:
        raise damaged_file(path, str(error)) from None
    return require_shape(path, value, shape)


def read_mapping(path: Path, shape: Any = dict) -> dict[str, Any]:
    """Return the JSON object in a file, for display; decisions need `read_json`.

    Empty if the file is missing or, with one warning, unreadable.
    """
    try:
        return read_json(path, shape) or {}
    except ConfigError as error:
        warn_once(path, error.problems[0])
        return {}


def warn_once(path: Path, problem: Problem) -> None:
    """Warn of an unreadable file, once in this process."""
    if path not in _WARNED:
        _WARNED.add(path)
        print(f"warning: {problem}", file=sys.stderr)


def has_warned(folder: str) -> bool:
    """Whether `warn_once` has warned of a file in a folder."""
    return any(str(path.parent) == folder for path in _WARNED)


_WARNED = set[Path]()


def read_lines(path: Path, *, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file from `offset` with their numbers (from 1) and ends.

    Yields nothing if there is no file. The last line may lack its end.

    Raises:
        DamagedFile: It is a pipe, or a line is longer than `LARGEST`.
        ConfigError: It cannot be read now.
    """
    handle = open_to_read(path)
    if handle is None:
        return
    with handle:
        try:
            handle.seek(offset)
            for number in itertools.count(1):
                line = handle.readline(LARGEST + 1)
                if not line:
                    return
                if len(line) > LARGEST:
                    raise damaged_file(path, f"line {number} is longer than {LARGEST >> 20} MiB")
                yield number, line
        except OSError as error:
            raise _unreadable(path, error) from None


def cut_torn_line(file: int) -> None:
    """Cut an incomplete last line off an open file, left by a process that died while writing."""
    size = end = os.fstat(file).st_size
    while end > 0:
        # In blocks from the end, since the file may be large
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)


def append_lines(path: Path, text: str) -> None:
    """Append whole lines durably, after what a process that died left of a line is cut off."""
    with path.open("ab+") as handle:
        cut_torn_line(handle.fileno())
        handle.write(text.encode())
        handle.flush()
        os.fsync(handle.fileno())


def parse_json(text: bytes | str) -> Any:
    """Parse a JSON value; raise a ValueError that says plainly why the text is invalid."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(
            f"it is not JSON ({first_line(error)})" if text.strip() else "it is empty"
        ) from None


def require_shape(path: Path, value: Any, shape: Any, at: str = "") -> Any:
    """Return the value, with its numbers as floats; raise DamagedFile if it has another shape."""
    if misfit := describe_misfit(value, shape, at):
        raise damaged_file(path, misfit)
    return with_numbers(value, shape)


def damaged_file(path: Path, why: str) -> DamagedFile:
    """Return the error that a file of a run or sweep is not as samewise wrote it."""
    return DamagedFile(
        Problem(
            str(path),
            f"is damaged: {why}",
            hint="restore it from a copy, or move it elsewhere; it has been left as it is",
        )
    )


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        Problem(
            str(path),
            f"cannot be read: {error.strerror}",
            hint="check the storage and the permissions, then run the same command again",
        )
    )
