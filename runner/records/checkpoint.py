"""Checkpoints: named tensors and plain values, hashed, complete or absent, and loaded without running code.

    checkpoints/step-00000040/state.pt         torch.save of tensors and plain values; loaded with weights_only=True
    checkpoints/step-00000040/manifest.json    step, steps of an epoch and in all, sha256 of state.pt, digest of the weights, metrics
    checkpoints/step-00000040/shards/          with checkpoint.sharded, the tensors that the processes held in shards (`shards`)
    checkpoints/latest, checkpoints/best       links to folders, replaced atomically; checkpoints/best-valid-loss by a metric of `evaluate.also`

A folder is written under another name, synced and renamed, so a folder with that name is complete; the hash shows later damage.
A damaged one is renamed, and none is removed because it could not be read.
"""

from __future__ import annotations

import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import CheckpointError, ConfigError, DamagedCheckpoint, DamagedFile, Problem, did_you_mean, first_line
from samewise.runner.records import shapes, shards
from samewise.runner.records.files import damaged_file, open_to_read, read_json, require_no_link, require_shape, sha256

FORMAT = 1
_MOST_REPEATED = 1 << 26


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint on disk."""

    path: Path
    step: int
    metrics: Mapping[str, float] | None
    """None if they cannot be read."""


def list_checkpoints(folder: Path) -> list[CheckpointFolder]:
    """The checkpoints in a folder, by step. Only `load` checks whether they are intact. Other files and folders are ignored.

    CheckpointError if the folder cannot be read now: that is not the same as having none.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        names = []
    except OSError as error:
        hint = "check the storage and the permissions, then run the same command again"
        raise CheckpointError(Problem(str(folder), f"the checkpoints cannot be read: {error.strerror}", hint=hint)) from None
    steps = ((int(match[1]), folder / name) for name in names if (match := re.fullmatch(r"step-(\d{8,18})", name)))
    return [CheckpointFolder(path, step, _metrics(path)) for step, path in sorted(steps)]


def choose_checkpoint(folder: Path, which: str) -> CheckpointFolder:
    """The checkpoint in a folder for `best`, `last`, a step, or a metric of `evaluate.also`; for `best` the last one if none is marked.

    CheckpointError if there are no checkpoints, or the named one does not exist.
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
    raise CheckpointError(Problem("--checkpoint", "no such checkpoint", which, f"one of {', '.join(dict.fromkeys(known))}", did_you_mean(which, known)))


def note_if_not_meant(folder: Path, summary: Mapping[str, Any], which: str) -> None:
    """Print a note if the checkpoint chosen as best (`best`, or a metric of `evaluate.also`) is not that of the best evaluation; a warning if that is kept.

    A warning too if the `last` is not that of the last step.
    """
    measured, steps = summary.get("metrics", {}), summary.get("steps", 0)
    best = measured.get("best", {}) if which == "best" else measured.get("also", {}).get(which, {})
    step = choose_checkpoint(folder, which).step
    if which == "last" and step < steps:
        print(f"warning: {folder.parent}: training went on to step {steps}, whose checkpoint is missing; this is step {step}", file=sys.stderr)
    if "step" in best and int(best["step"]) != step:
        is_gone = not (folder / f"step-{int(best['step']):08d}").exists()
        words = (
            f"the best evaluation was at step {best['step']:.0f}{', whose checkpoint is gone (checkpoint.keep_best=1 keeps it)' * is_gone}; this is step {step}"
        )
        print(f"{'note' if is_gone else 'warning'}: {folder.parent}: {words}", file=sys.stderr)


def misled_links(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """A sentence for each link to a best checkpoint that leads elsewhere than to the step of the best evaluation, if that is kept."""
    measured = summary.get("metrics", {})
    bests = {"best": measured.get("best", {}), **{best_by(name): best for name, best in measured.get("also", {}).items()}}
    wanted = {folder / name: folder / f"step-{int(best['step']):08d}" for name, best in bests.items() if "step" in best}
    return [
        f"{folder.name}/{link.name} leads to {link.resolve().name}, and summary.json has the best evaluation at {there.name}"
        for link, there in wanted.items()
        if link.is_symlink() and there.exists() and link.resolve() != there.resolve()
    ]


def best_by(metric: str) -> str:
    """The link to the best checkpoint by a metric of `evaluate.also`."""
    return f"best-{metric.replace('/', '-')}"


def _metrics(path: Path) -> Mapping[str, float] | None:
    manifest = manifest_of(path)
    return None if manifest is None else manifest.get("metrics", {})


def manifest_of(path: Path) -> dict[str, Any] | None:
    """What a checkpoint's manifest says; None if it cannot be read."""
    try:
        return _manifest(path)
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
    """The files that were written into a checkpoint's folder, without others that are beside them.

    DamagedFile if one is a link, which may lead to any file of the user's, or is not a regular file.
    """
    folder = path / shards.FOLDER
    listed = [path / "manifest.json", path / "state.pt", *(sorted(folder.iterdir()) if folder.is_dir() else ())]
    require_no_link(folder, *listed)
    found = {file: open_to_read(file) for file in listed}
    for handle in filter(None, found.values()):
        handle.close()
    return [file for file, handle in found.items() if handle is not None]


def _incomplete(path: Path) -> DamagedCheckpoint:
    words = "the checkpoint is incomplete" if path.is_dir() else "there is no checkpoint"
    return DamagedCheckpoint(Problem(str(path), words, expected="state.pt and manifest.json"))


def _require_format(path: Path, written: Mapping[str, Any]) -> None:
    if written.get("format") != FORMAT:
        hint = "load it with the version of samewise that wrote it, or a newer one"
        raise CheckpointError(Problem(str(path), "the checkpoint has a different format", written.get("format"), str(FORMAT), hint))


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, on the CPU, without the tensors in shards, which `load_sharded` adds.

    DamagedCheckpoint if it is incomplete, cut short or altered; CheckpointError if it cannot be read now: the disk fails, there is too little memory, its
    format is another.
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
            raise damaged_file(path / "state.pt", f"it names {name!r}, which is not a file among its shards")
        shard = path / shards.FOLDER / name
        if not shard.exists() or sha256(shard) != digest:
            raise DamagedCheckpoint(Problem(str(shard), "is missing, or was altered since it was written", expected=f"sha256 {digest[:16]}..."))
    return state


def _require_as_large_as_it_is(path: Path) -> None:
    """Refuse a compressed file: torch.save does not compress, and a repacked file may expand a thousandfold."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(one.file_size for one in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):  # in an older format, or damaged: torch reports which
        return
    if size > path.stat().st_size:
        raise pickle.UnpicklingError(f"it is compressed ({size:,} bytes when unpacked), as torch.save never writes it; it was not loaded")


def _require_whole_tensors(found: Any) -> None:
    """Refuse tensors with repeated elements (as from `expand`), whose copy may exceed any memory."""
    pending, seen = [found], set[int]()
    for one in pending:
        if isinstance(one, Tensor) and one.layout == torch.strided:
            held, size = one.untyped_storage().nbytes(), one.numel() * one.element_size()
            if size > max(held, _MOST_REPEATED):
                words = f"it has a tensor of shape {list(one.shape)} that repeats {held:,} stored bytes to make {size:,}; it was not loaded"
                raise pickle.UnpicklingError(words)
        elif isinstance(one, Mapping | list | tuple | set) and id(one) not in seen:  # it may contain itself
            seen.add(id(one))
            pending += one.values() if isinstance(one, Mapping) else one


def load_tensors(path: Path) -> Any:
    """Load a torch.save file of tensors and plain values. Anything else is refused, and nothing that the file names is created or called.

    pickle.UnpicklingError if there is something else in it, or some other exception if it is not such a file.
    """
    _require_as_large_as_it_is(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to disable the protection
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"names {named[1]}, which may run code" if named else "contains more than tensors and plain values, or is damaged"
        raise pickle.UnpicklingError(f"it {what}; it was not loaded") from None
    except RuntimeError as error:  # the same for a tar archive
        if "weights_only" not in str(error):
            raise
        raise pickle.UnpicklingError("it is an archive, such as a bundle, which contains more than tensors (`tar -xf` unpacks it); it was not loaded") from None
    _require_whole_tensors(found)
    return found


def load(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, on the CPU. DamagedCheckpoint if it is incomplete, cut short or altered; CheckpointError if it cannot be read now."""
    return load_sharded(read(path), path)


def load_sharded(state: dict[str, Any], path: Path, empty: Callable[[list[int], torch.dtype], Tensor] | None = None) -> dict[str, Any]:
    """The result of `read` with the tensors in shards; `empty` creates each, or this process's shard. A CheckpointError if they cannot be read."""
    if "shards" not in state:
        return state
    try:
        return shards.load_shards(state, path / shards.FOLDER, state["shards"], empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype)))
    except Exception as error:
        raise CheckpointError(Problem(str(path / shards.FOLDER), f"the shards cannot be read: {first_line(error)}")) from error


def newest_sound(folder: Path, *, reader: Callable[[Path], dict[str, Any]] = load) -> tuple[CheckpointFolder | None, dict[str, Any], list[Problem]]:
    """(checkpoint, its state, problems of newer ones); (None, {}, []) if there are no checkpoints.

    Only damage is a reason to take an older one: what cannot be read now may be read later. CheckpointError if none is sound, or if one that is newer than the
    newest sound one cannot be read and is not damaged.
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
