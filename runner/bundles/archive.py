"""A bundle's file: a tar archive that is byte for byte the same for the same parts.

It is not compressed: its bytes then depend on no version of zlib, nothing in it expands without
limit, and `tar -x` opens it. The first part, `manifest.json`, has the SHA-256 of every other part,
so that any alteration is detected and named; its own SHA-256 is the bundle's identity, which the
second part holds. Headers have no times and no owners. Does not import torch.
"""

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from samewise.runner.errors import ConfigError, DamagedFile, Problem, make_room
from samewise.runner.records import shapes
from samewise.runner.records.files import LARGEST, open_to_read, parse_json

RUN = "run"
"""Folder in a bundle with the run's own files."""
CODE, OWN = "code", "own"
"""Folders with the user's code and with samewise's, importable."""
FACTS, LOCK, DATA = "bundle.json", "requirements.txt", "data.json"
"""The run's facts and results, the versions of all packages, and the files of the data."""
MANIFEST, IDENTITY = "manifest.json", "manifest.sha256"
FORMAT = 1
_SHAPE = {"format": int, "parts": {str: {"bytes": int, "sha256": shapes.SHA256}}}
Part = Path | bytes


def write(file: Path, parts: Mapping[str, Part]) -> str:
    """Write a bundle; return its identity.

    Raises:
        ConfigError: The file exists already or cannot be written.
    """
    facts = {name: _facts(part) for name, part in sorted(parts.items())}
    manifest = (
        json.dumps({"format": FORMAT, "parts": facts}, indent=1, sort_keys=True) + "\n"
    ).encode()
    identity = hashlib.sha256(manifest).hexdigest()
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as handle:
            with tarfile.open(
                fileobj=handle,
                mode="w",
                format=tarfile.PAX_FORMAT,
                encoding="utf-8",
                errors="strict",
            ) as archive:
                for name, part in (
                    (MANIFEST, manifest),
                    (IDENTITY, f"{identity}\n".encode()),
                    *sorted(parts.items()),
                ):
                    _append(archive, name, part)
            handle.flush()
            os.fsync(handle.fileno())
        # A link, unlike a rename, replaces nothing
        os.link(temporary, file)
    except FileExistsError:
        raise already_exists(file) from None
    except OSError as error:
        raise ConfigError(
            Problem(
                str(file),
                f"cannot be written: {error.strerror}",
                expected="a new file in a folder that you can write to",
            )
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return identity


def already_exists(file: Path) -> ConfigError:
    """Return the error that the file exists: nothing is overwritten."""
    return ConfigError(
        Problem(
            str(file),
            "already exists and is not overwritten",
            hint="give another name, or move it away",
        )
    )


def _facts(part: Part) -> dict[str, Any]:
    with io.BytesIO(part) if isinstance(part, bytes) else open(part, "rb") as handle:
        sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
        return {"bytes": handle.seek(0, os.SEEK_END), "sha256": sha256}


def _append(archive: tarfile.TarFile, name: str, part: Part) -> None:
    # Not made from the file, whose time and owner would get into the header
    info = tarfile.TarInfo(name)
    info.size = len(part) if isinstance(part, bytes) else part.stat().st_size
    with io.BytesIO(part) if isinstance(part, bytes) else open(part, "rb") as source:
        archive.addfile(info, source)


@dataclass
class Contents:
    """The content of a bundle that matched its manifest."""

    identity: str
    parts: Mapping[str, Mapping[str, Any]]


def unpack(file: Path, into: Path, *, expect: str | None = None) -> Contents:
    """Write each part into a folder, and compare it with the manifest.

    Args:
        file: The bundle.
        into: An empty or new folder; it is removed if anything is wrong.
        expect: The identity that the bundle must have.

    Raises:
        ConfigError: It is not a bundle; or parts of it, which the message names, were altered,
            added, removed or renamed.
    """
    handle = open_to_read(file)
    if handle is None:
        raise ConfigError(Problem(str(file), "does not exist", expected="a bundle"))
    with handle:
        try:
            return _unpack(handle, into, expect)
        except ConfigError as error:
            problems = [
                replace(problem, path=f"{file}: {problem.path}") for problem in error.problems
            ]
        except OSError as error:
            elsewhere = "choose another folder with --out or the environment variable TMPDIR"
            problems = [
                Problem(
                    str(file),
                    f"cannot be unpacked: {error.strerror}",
                    hint=" or ".join(filter(None, [make_room(error.errno, into), elsewhere])),
                )
            ]
        except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
            problems = [
                Problem(
                    str(file),
                    f"is not a bundle, or is cut off: {error}",
                    hint="copy or download it again; `samewise bundle RUN --out FILE` makes one",
                )
            ]
    shutil.rmtree(into, ignore_errors=True)
    raise ConfigError(*problems)


def _unpack(handle: BinaryIO, into: Path, expect: str | None) -> Contents:
    # Without decompression, so that nothing expands without limit
    with tarfile.open(fileobj=handle, mode="r:") as archive:
        manifest, identity = (_read(archive, name) for name in (MANIFEST, IDENTITY))
        contents = Contents(hashlib.sha256(manifest).hexdigest(), _read_manifest(manifest))
        ConfigError.raise_if(
            identity != f"{contents.identity}\n".encode(),
            MANIFEST,
            f"was altered, or {IDENTITY} was: they do not agree",
        )
        ConfigError.raise_if(
            expect is not None and expect.lower() != contents.identity,
            MANIFEST,
            "this is not the bundle that was expected",
            contents.identity,
            expect or "",
        )
        # The first two are the manifest and its digest
        members = {member.name: member for member in archive.getmembers()[2:]}
        # Two empty blocks end an archive; tarfile also accepts a file that is cut off before them
        if os.fstat(handle.fileno()).st_size < archive.offset + 2 * tarfile.BLOCKSIZE:
            raise tarfile.ReadError("unexpected end of data")
        problems = [Problem(name, "is missing") for name in contents.parts if name not in members]
        for name, member in members.items():
            if name not in contents.parts:
                problems.append(Problem(name, "was added: the manifest does not name it"))
            elif not member.isreg() or member.size != contents.parts[name]["bytes"]:
                problems.append(Problem(name, "was altered: it is not a file of the same size"))
        ConfigError.raise_all(problems)
        for member in members.values():
            # The filter strips leading slashes, so that a name would no longer be the manifest's
            ConfigError.raise_if(
                not member.name or tarfile.data_filter(member, str(into)).name != member.name,
                member.name,
                "is not a valid path in a bundle",
            )
            archive.extract(member, into, filter="data")
    digests = {name: _facts(into / name)["sha256"] for name in members}
    ConfigError.raise_all(
        Problem(name, "was altered", digest, f"SHA-256 {contents.parts[name]['sha256']}")
        for name, digest in digests.items()
        if digest != contents.parts[name]["sha256"]
    )
    return contents


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    """Return the content of the archive's next part, which must have this name."""
    member = archive.next()
    if member is None or member.name != name or not member.isreg():
        raise ConfigError(
            Problem(
                name,
                "is not where it should be: this is not a bundle, or it was altered or cut off",
                member.name if member else "nothing",
                name,
                "`samewise bundle RUN --out FILE` makes one",
            )
        )
    # The part is read whole, before anything of it is checked
    ConfigError.raise_if(member.size > LARGEST, name, f"is larger than {LARGEST >> 20} MiB")
    part = archive.extractfile(member)
    assert part is not None
    return part.read()


def _read_manifest(manifest: bytes) -> Mapping[str, Mapping[str, Any]]:
    try:
        value = parse_json(manifest)
        misfit = shapes.describe_misfit(value, _SHAPE)
    except ValueError as error:
        value, misfit = {}, str(error)
    DamagedFile.raise_if(misfit, MANIFEST, f"was altered: {misfit}")
    ConfigError.raise_if(
        value["format"] != FORMAT,
        MANIFEST,
        "the bundle has a different format",
        value["format"],
        str(FORMAT),
        "use a newer samewise",
    )
    return value["parts"]
