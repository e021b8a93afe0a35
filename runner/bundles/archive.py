"""A bundle's file: a tar archive that is byte for byte the same for the same parts; any alteration is found and named.

It is not compressed: its bytes then depend on no version of zlib, nothing in it unfolds without measure, and `tar -x` opens it. The first part,
`manifest.json`, has the SHA-256 of every other; its own is the bundle's identity, and stands in the second part, so that a manifest that was altered by itself
is told from the parts. All headers are what `tarfile` writes for a regular file of that name and size: no times, modes, owners, links. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from samewise.runner.errors import ConfigError, DamagedFile, Problem
from samewise.runner.records import shapes
from samewise.runner.records.files import LARGEST, nearest_existing, open_to_read, parse_json

RUN = "run"
"""The folder in a bundle that is the run's own."""
CODE, OWN = "code", "own"
"""The folders with the user's code and with samewise's, importable."""
FACTS, LOCK, DATA = "bundle.json", "requirements.txt", "data.json"
"""What the run was and came to, the versions of all packages, the files of the data."""
MANIFEST, IDENTITY = "manifest.json", "manifest.sha256"
FORMAT = 1
_SHAPE = {"format": int, "parts": {str: {"bytes": int, "sha256": shapes.SHA256}}}
_SAFE = re.compile(r"(?!/)(?:(?!\.{1,2}(?:/|$))[^/\\\x00-\x1f\x7f]{1,255}(?:/(?=.)|$))+")
_CHUNK = 1 << 20
_NAMED = 8
"""How many missing parts are named."""
_RECORD = tarfile.RECORDSIZE
_TAR_FAULTS = (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError, KeyError, IndexError)

Part = Path | bytes


def write(file: Path, parts: Mapping[str, Part]) -> str:
    """Write a bundle; return its identity. ConfigError if the file is there already or cannot be written."""
    listed = {name: _facts(part) for name, part in sorted(parts.items())}
    manifest = _dump({"format": FORMAT, "parts": listed})
    identity = hashlib.sha256(manifest).hexdigest()
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as handle:
            for name, part in ((MANIFEST, manifest), (IDENTITY, f"{identity}\n".encode()), *sorted(parts.items())):
                _append(handle, name, part)
            handle.write(_end(handle.tell()))
            handle.flush()
            os.fsync(handle.fileno())
        os.link(temporary, file)  # unlike a rename, it replaces nothing
    except FileExistsError:
        raise already_exists(file) from None
    except OSError as error:
        raise ConfigError(Problem(str(file), f"cannot be written: {error.strerror}", expected="a new file in a folder that you can write to")) from None
    finally:
        temporary.unlink(missing_ok=True)
    return identity


def already_exists(file: Path) -> ConfigError:
    """The error if the file exists: nothing is overwritten."""
    return ConfigError(Problem(str(file), "already exists and is not overwritten", hint="give another name, or move it away"))


def _facts(part: Part) -> dict[str, Any]:
    if isinstance(part, bytes):
        return {"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
    with open(part, "rb") as handle:
        return {"bytes": os.fstat(handle.fileno()).st_size, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}


def _dump(manifest: Any) -> bytes:
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def _append(handle: BinaryIO, name: str, part: Part) -> None:
    size = len(part) if isinstance(part, bytes) else part.stat().st_size
    handle.write(_header(name, size))
    with io.BytesIO(part) if isinstance(part, bytes) else open(part, "rb") as source:
        shutil.copyfileobj(source, handle, _CHUNK)
    handle.write(b"\0" * (-size % tarfile.BLOCKSIZE))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _end(place: int) -> bytes:
    """The end of the archive: two blocks of zeros, then padding to a full record."""
    return b"\0" * (2 * tarfile.BLOCKSIZE + -(place + 2 * tarfile.BLOCKSIZE) % _RECORD)


@dataclass
class Contents:
    """The content of a bundle that matched its manifest."""

    identity: str
    parts: Mapping[str, Mapping[str, Any]]


def unpack(file: Path, into: Path | None = None, *, expect: str | None = None) -> Contents:
    """Compare each part with the manifest and, if a folder is given, write the part into it.

    ConfigError if it is not a bundle, or if parts of it were altered, added, removed or renamed, each of which is named.

    Args:
        file: The bundle.
        into: An empty or new folder; it is removed if anything is wrong.
        expect: The identity that it must have.
    """
    handle = open_to_read(file)
    if handle is None:
        raise ConfigError(Problem(str(file), "does not exist", expected="a bundle"))
    with handle:
        try:
            reading = _Reading(file, handle, into)
            contents, problems = reading.contents, reading.problems()
        except OSError as error:
            contents, problems = None, [Problem(str(file), f"cannot be unpacked: {error.strerror}", hint="free some space, or choose another folder")]
    if contents is not None and expect is not None and expect.lower() != contents.identity:
        problems.insert(0, Problem(MANIFEST, "this is not the bundle that was expected", contents.identity, expect))
    if problems:
        if into is not None:
            shutil.rmtree(into, ignore_errors=True)
        raise ConfigError(*(one if one.path == str(file) else replace(one, path=f"{file}: {one.path}") for one in problems))
    assert contents is not None
    return contents


class _Headers:
    """Reads a bundle's tar headers with tarfile, and refuses one longer than samewise writes: a sparse file could claim any length."""

    def __init__(self, handle: BinaryIO) -> None:
        self.tell, self.seek, self._read = handle.tell, handle.seek, handle.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _CHUNK:
            raise tarfile.ReadError("a header is too long")
        return self._read(size)


class _Reading:
    """One pass over a bundle."""

    def __init__(self, file: Path, handle: BinaryIO, into: Path | None) -> None:
        self._file, self._handle, self._into = file, handle, into
        self._size = os.fstat(handle.fileno()).st_size
        if into is not None and self._size > (free := shutil.disk_usage(nearest_existing(into)).free):
            words = f"is not unpacked: it has {self._size:,} bytes, and {into.parent} has room for {free:,}"
            raise ConfigError(Problem(str(file), words, hint="free some space, or choose another folder with --out or the environment variable TMPDIR"))
        self._found = dict[str, Mapping[str, Any]]()
        self._problems = list[Problem]()
        self._cut: Problem | None = None
        members = self._members()
        manifest = self._small(members, MANIFEST)
        identity = hashlib.sha256(manifest).hexdigest()
        self._said = self._small(members, IDENTITY)
        self._agrees = self._said == f"{identity}\n".encode()
        self.contents = Contents(identity, self._read_manifest(manifest))
        self._members_left = members

    def problems(self) -> list[Problem]:
        """Read the parts; return what is wrong with them."""
        for name, read in self._members_left:
            self._take(name, read)
        listed, found = self.contents.parts, self._found
        if self._cut is not None and (cut := self._find_truncation(listed, found)):
            return [cut]
        self._problems += [self._cut] if self._cut else []
        altered = [name for name in listed if name in found and found[name] != listed[name]]
        added, missing = [name for name in found if name not in listed], [name for name in listed if name not in found]
        if not self._agrees:
            name, other = (MANIFEST, IDENTITY) if altered or added or missing or not self._is_written_so else (IDENTITY, MANIFEST)
            self._problems.insert(0, Problem(name, f"was altered: it does not agree with {other}"))
        self._problems += [Problem(name, "was altered", found[name]["sha256"], f"SHA-256 {listed[name]['sha256']}") for name in altered]
        for name in missing[:_NAMED]:
            renamed = next((one for one in added if found[one] == listed[name]), None)
            self._problems.append(Problem(name, "is missing", hint=f"{renamed} has its content" if renamed else ""))
        if len(missing) > _NAMED:
            self._problems.append(Problem(str(self._file), f"{len(missing) - _NAMED} more parts are missing"))
        self._problems += [Problem(name, "was added: the manifest does not name it") for name in added]
        return self._problems

    def _find_truncation(self, listed: Mapping[str, Mapping[str, Any]], found: Mapping[str, Any]) -> Problem | None:
        """That the archive ends too early, where all that is there is as the manifest has it; None where something else is wrong."""
        sizes = {MANIFEST: len(_dump({"format": FORMAT, "parts": dict(listed)})), IDENTITY: 65, **{name: listed[name]["bytes"] for name in sorted(listed)}}
        try:
            whole = sum(len(_header(name, size)) + size + -size % tarfile.BLOCKSIZE for name, size in sizes.items())
        except _TAR_FAULTS:
            return None
        whole += len(_end(whole))
        if self._problems or self._size >= whole or dict(found) != {name: listed[name] for name in sorted(listed)[: len(found)]}:
            return None
        words = f"is cut off after {self._size:,} of {whole:,} bytes: {len(found)} of its {len(listed)} parts are whole"
        return Problem(str(self._file), words, hint="copy or download it again")

    def _take(self, name: str, read: Callable[[], Iterator[bytes]]) -> None:
        if name in self._found or name in (MANIFEST, IDENTITY):
            self._problems.append(Problem(name, "is there twice"))
            return
        digest, size = hashlib.sha256(), 0
        with contextlib.ExitStack() as stack:
            target = None
            if self._into is not None and name in self.contents.parts:
                place = self._into / name
                place.parent.mkdir(parents=True, exist_ok=True)
                target = stack.enter_context(open(place, "xb"))
            for chunk in read():
                digest.update(chunk)
                size += len(chunk)
                if target:
                    target.write(chunk)
        self._found[name] = {"bytes": size, "sha256": digest.hexdigest()}

    def _members(self) -> Iterator[tuple[str, Callable[[], Iterator[bytes]]]]:
        """Yield each part's name and a reader of its content; headers, padding and the archive's end are compared with what `write` produces."""
        place, last = 0, "its beginning"
        with contextlib.suppress(*_TAR_FAULTS), tarfile.open(fileobj=cast(BinaryIO, _Headers(self._handle)), mode="r:") as archive:
            for info in archive:
                if info.offset != place or self._raw(info.offset, info.offset_data - info.offset) != _header(info.name, info.size):
                    self._problems.append(Problem(info.name, "its header in the archive was altered, or was not written by `samewise bundle`"))
                if not info.isreg() or info.offset_data + info.size > self._size:
                    self._cut = Problem(info.name, "is not a regular file, or was cut off")
                    return
                last, place = info.name, info.offset_data + info.size
                yield info.name, lambda info=info: self._chunks(info.offset_data, info.size)
                padding = -info.size % tarfile.BLOCKSIZE
                if self._raw(place, padding) != b"\0" * padding:
                    self._problems.append(Problem(info.name, "the padding after it in the archive was altered"))
                place += padding
        if self._size - place > 2 * _RECORD or self._raw(place, self._size - place) != _end(place):
            self._cut = Problem(last, f"what follows it in the archive was altered or cut off (byte {place})")

    def _small(self, members: Iterator[tuple[str, Callable[[], Iterator[bytes]]]], name: str) -> bytes:
        found, read = next(members, ("", lambda: iter(())))
        if found != name:
            hint = "" if name == IDENTITY else "`samewise bundle RUN --out FILE` makes one"
            raise ConfigError(
                Problem(
                    f"{self._file}: {name}", "is not where it should be: this is not a bundle, or it was altered or cut off", found or "nothing", name, hint
                )
            )
        raw = bytearray()
        for chunk in read():
            raw += chunk
            if len(raw) > LARGEST:
                raise ConfigError(Problem(f"{self._file}: {name}", f"is larger than {LARGEST >> 20} MiB"))
        return bytes(raw)

    def _read_manifest(self, manifest: bytes) -> Mapping[str, Mapping[str, Any]]:
        try:
            value = parse_json(manifest)
            wrong = shapes.describe_misfit(value, _SHAPE)
        except ValueError as error:
            value, wrong = {}, str(error)
        names: Mapping[str, Any] = {} if wrong else value["parts"]
        self._is_written_so = _dump(value) == manifest
        if not wrong and self._agrees and value["format"] != FORMAT:
            raise ConfigError(Problem(f"{self._file}: {MANIFEST}", "the bundle has a different format", value["format"], str(FORMAT), "use a newer samewise"))
        if not wrong:
            strange = next((name for name in names if not _is_safe(name, names)), None)
            wrong = (
                "it names another format"
                if value["format"] != FORMAT
                else f"it names {strange!r}, which is not a valid path in a bundle"
                if strange is not None
                else ""
            )
        if wrong:
            raise DamagedFile(Problem(f"{self._file}: {MANIFEST}", f"{'is not a valid manifest' if self._agrees else 'was altered'}: {wrong}"))
        return names

    def _chunks(self, at: int, size: int) -> Iterator[bytes]:
        for start in range(at, at + size, _CHUNK):
            yield self._raw(start, min(_CHUNK, at + size - start))

    def _raw(self, at: int, size: int) -> bytes:
        return os.pread(self._handle.fileno(), size, at)


def _is_safe(name: str, names: Mapping[str, Any]) -> bool:
    """Whether a part's path stays inside whatever folder it is unpacked to."""
    parents = Path(name).parents
    return len(name) <= 1024 and _SAFE.fullmatch(name) is not None and not any(str(parent) in names for parent in parents)
