"""Checkpoints: named tensors and plain values, hashed, complete or absent, and loaded without running anything.

    checkpoints/step-00000040/state.pt         torch.save of tensors and plain values; loaded with weights_only=True
    checkpoints/step-00000040/manifest.json    step, steps of an epoch and in all, sha256 of state.pt, digest of the weights, metrics
    checkpoints/step-00000040/shards/          with checkpoint.sharded, the tensors that the processes held in shards (`shards`)
    checkpoints/latest, checkpoints/best       links to folders, replaced atomically; checkpoints/best-valid-loss by a metric of `evaluate.also`

A folder is written under another name, synced and renamed, so one that has its name is whole; what the disk did to it afterwards the hash tells.
A damaged one is renamed, and none is removed because it could not be read.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import CheckpointError, ConfigError, DamagedCheckpoint, DamagedFile, Problem, close, first_line
from samewise.runner.records import shapes, shards
from samewise.runner.records.files import damaged, open_to_read, read_json, require_no_link, require_shape, sha256

FORMAT = 1
_MOST_REPEATED = 1 << 26


@dataclass(frozen=True)
class Kept:
    """A checkpoint on disk."""

    path: Path
    step: int
    metrics: Mapping[str, float] | None
    """None where they cannot be read."""


def list_checkpoints(folder: Path) -> list[Kept]:
    """The checkpoints in a folder, by step. Only `load` finds out whether they are intact. Files and folders with other names are ignored.

    Raises:
        CheckpointError: the folder cannot be read now: that is not the same as having none.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        names = []
    except OSError as error:
        hint = "check the storage and the permissions, then run the same command again"
        raise CheckpointError(Problem(str(folder), f"the checkpoints cannot be read: {error.strerror}", hint=hint)) from None
    steps = ((int(match[1]), folder / name) for name in names if (match := re.fullmatch(r"step-(\d{8,18})", name)))
    return [Kept(path, step, _metrics(path)) for step, path in sorted(steps)]


def choose_checkpoint(folder: Path, which: str) -> Kept:
    """The checkpoint in a folder that `best`, `last`, a step, or a metric of `evaluate.also` names; the last where none is called best.

    Raises:
        CheckpointError: there are no checkpoints, or not the one named.
    """
    kept = list_checkpoints(folder)
    if not kept:
        raise CheckpointError(Problem(str(folder.parent), "the run has no checkpoint yet"))
    if which == "last":
        return kept[-1]
    if which == "best":
        link = folder / "best"
        return next((one for one in kept if link.exists() and one.path.samefile(link)), kept[-1])
    link = folder / best_by(which)
    for one in kept:
        if str(one.step) == which or ("/" in which and link.exists() and one.path.samefile(link)):
            return one
    steps = [str(one.step) for one in kept]
    known = ["best", "last", *(name for one in kept for name in one.metrics or {} if (folder / best_by(name)).exists()), *steps]
    raise CheckpointError(Problem("--checkpoint", "no such checkpoint", which, f"one of {', '.join(dict.fromkeys(known))}", close(which, known)))


def best_by(metric: str) -> str:
    """The link to the checkpoint that is best by a metric of `evaluate.also`."""
    return f"best-{metric.replace('/', '-')}"


def _metrics(path: Path) -> Mapping[str, float] | None:
    try:
        return _manifest(path).get("metrics", {})
    except (CheckpointError, ConfigError):
        return None


def _manifest(path: Path) -> dict[str, Any]:
    file = path / "manifest.json"
    manifest = read_json(file, dict)
    if manifest is None:
        raise _incomplete(path)
    if "format" in manifest:
        _require_format(path, manifest)
    return require_shape(file, manifest, {"format": int, **shapes.MANIFEST})


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint's folder, to hand on: those that were written there, and nothing that lies beside them.

    Raises:
        DamagedFile: one is a link, which may lead to any file of the user's, or is no regular file.
    """
    folder = path / shards.FOLDER
    listed = [path / "manifest.json", path / "state.pt", *(sorted(folder.iterdir()) if folder.is_dir() else ())]
    require_no_link(folder, *listed)
    found = {file: open_to_read(file) for file in listed}
    for handle in filter(None, found.values()):
        handle.close()
    return [file for file, handle in found.items() if handle is not None]


def _incomplete(path: Path) -> DamagedCheckpoint:
    return DamagedCheckpoint(Problem(str(path), "the checkpoint is incomplete", expected="state.pt and manifest.json"))


def _require_format(path: Path, written: Mapping[str, Any]) -> None:
    if written.get("format") != FORMAT:
        hint = "load it with the version of samewise that wrote it, or a newer one"
        raise CheckpointError(Problem(str(path), "the checkpoint has a different format", written.get("format"), str(FORMAT), hint))


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, on the CPU, less the tensors that were written in shards: `load_sharded` adds those.

    Raises:
        DamagedCheckpoint: it is incomplete, cut short or altered.
        CheckpointError: it cannot be read now: the disk fails, there is too little memory, its format is another.
    """
    try:
        return _read(path)
    except CheckpointError:
        raise
    except DamagedFile as error:
        raise DamagedCheckpoint(*error.problems) from None
    except ConfigError as error:
        raise CheckpointError(*error.problems) from None
    except FileNotFoundError:
        raise _incomplete(path) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(Problem(str(path), f"the checkpoint was not loaded: {error}", expected="tensors and plain values")) from None
    except Exception as error:
        hint = "the file may be intact: check storage, memory and the version of torch, then try again"
        raise CheckpointError(Problem(str(path), f"the checkpoint cannot be read: {first_line(error)}", hint=hint)) from error


def _read(path: Path) -> dict[str, Any]:
    written = str(_manifest(path).get("sha256"))
    found = sha256(path / "state.pt")
    if found != written:
        reason = "the checkpoint was cut short or altered since it was written"
        hint = "`samewise train` resumes from the newest intact one; with `eval` and `predict`, choose another with --checkpoint last or a step number"
        raise DamagedCheckpoint(Problem(str(path), reason, f"sha256 {found[:16]}...", f"sha256 {written[:16]}...", hint))
    state: dict[str, Any] = load_tensors(path / "state.pt")
    require_shape(path / "state.pt", state, {"shards?": {str: str}})
    _require_format(path, state)
    for name, digest in state.get("shards", {}).items():
        if Path(name).name != name:
            raise damaged(path / "state.pt", f"it names {name!r}, which is not a file among its shards")
        shard = path / shards.FOLDER / name
        if not shard.exists() or sha256(shard) != digest:
            raise DamagedCheckpoint(Problem(str(shard), "is missing, or was altered since it was written", expected=f"sha256 {digest[:16]}..."))
    return state


def _require_as_large_as_it_is(path: Path) -> None:
    """torch.save packs nothing; a file that someone has packed anew may unpack to a thousand times its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(one.file_size for one in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):  # of an older form, or damaged: torch says so
        return
    if size > path.stat().st_size:
        raise pickle.UnpicklingError(f"it is compressed ({size:,} bytes when unpacked), as torch.save never writes it; it was not loaded")


def _require_whole_tensors(found: Any) -> None:
    """A tensor may say that it repeats a few numbers (as of `expand`) until no memory holds a copy of it."""
    pending, seen = [found], set[int]()
    for one in pending:
        if isinstance(one, Tensor) and one.layout == torch.strided:
            held, size = one.untyped_storage().nbytes(), one.numel() * one.element_size()
            if size > max(held, _MOST_REPEATED):
                words = f"it has a tensor of shape {list(one.shape)} that repeats {held:,} stored bytes to make {size:,}; it was not loaded"
                raise pickle.UnpicklingError(words)
        elif isinstance(one, Mapping | list | tuple | set) and id(one) not in seen:  # which may contain itself
            seen.add(id(one))
            pending += one.values() if isinstance(one, Mapping) else one


def load_tensors(path: Path) -> Any:
    """What is in a file of torch.save: tensors and plain values. Anything else is refused, and nothing that such a file names is made or called.

    Raises:
        pickle.UnpicklingError: there is something else in it.
        Exception: it is no such file.
    """
    _require_as_large_as_it_is(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to switch the protection off
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"names {named[1]}, which may run code" if named else "contains more than tensors and plain values, or is damaged"
        raise pickle.UnpicklingError(f"it {what}; it was not loaded") from None
    except RuntimeError as error:  # of a tar archive it advises so too
        if "weights_only" not in str(error):
            raise
        raise pickle.UnpicklingError("it is an archive, such as a bundle, which contains more than tensors (`tar -xf` unpacks it); it was not loaded") from None
    _require_whole_tensors(found)
    return found


def load(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, on the CPU.

    Raises:
        DamagedCheckpoint: it is incomplete, cut short or altered.
        CheckpointError: it cannot be read now.
    """
    return load_sharded(read(path), path)


def load_sharded(state: dict[str, Any], path: Path, empty: Callable[[list[int], torch.dtype], Tensor] | None = None) -> dict[str, Any]:
    """What `read` gave, with the tensors that were written in shards; `empty` makes each, or this process's shard. A CheckpointError: they cannot be read."""
    if "shards" not in state:
        return state
    try:
        return shards.load_shards(state, path / shards.FOLDER, state["shards"], empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype)))
    except Exception as error:
        raise CheckpointError(Problem(str(path / shards.FOLDER), f"the shards cannot be read: {first_line(error)}")) from error


def newest_sound(folder: Path, *, reader: Callable[[Path], dict[str, Any]] = load) -> tuple[Kept | None, dict[str, Any], list[Problem]]:
    """(checkpoint, its state, what was wrong with newer ones); (None, {}, []) if there are no checkpoints.

    Only damage is a reason to take an older one: what cannot be read now may be read later.

    Raises:
        CheckpointError: none is sound, or one that is newer than the newest sound one cannot be read and is not damaged.
    """
    problems, refused, older = list[Problem](), False, ""
    for one in reversed(list_checkpoints(folder)):
        try:
            state = reader(one.path)
        except DamagedCheckpoint as error:
            problems += (replace(problem, hint="") for problem in error.problems)
            continue
        except CheckpointError as error:
            problems += error.problems
            refused = True
            continue
        if not refused:
            return one, state, problems
        older = f"; {one.path.name} can be read: to resume from it, move the newer ones elsewhere"
        break
    if problems:
        hint = f"check storage, memory and the version of samewise, then run the same command again{older}; or start a new run with a different name="
        raise CheckpointError(*problems, Problem(str(folder), "no checkpoint to resume from; nothing has been deleted", hint=hint))
    return None, {}, []
