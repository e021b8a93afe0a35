"""Checkpoints: named tensors and plain values, hashed, complete or absent, and loaded without
running code.

    checkpoints/step-00000040/state.pt         torch.save of tensors and plain values; loaded with
    weights_only=True checkpoints/step-00000040/manifest.json    step, steps of an epoch and in all,
    sha256 of state.pt, digest of the weights, metrics checkpoints/step-00000040/shards/
    with checkpoint.sharded, the tensors that the processes held in shards (`shards`)
    checkpoints/latest, checkpoints/best       links to folders, replaced atomically;
    checkpoints/best-valid-loss by a metric of `evaluate.also`

A folder is written under another name, synced and renamed, so a folder with that name is complete;
the hash shows later damage. A damaged one is renamed, and none is removed because it could not be
read.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    DamagedFile,
    Problem,
    first_line,
)
from samewise.runner.records import shards
from samewise.runner.records.files import (
    damaged_file,
    open_to_read,
    require_no_link,
    require_shape,
    sha256,
)
from samewise.runner.records.folder import SHARDS
from samewise.runner.records.kept_checkpoints import (
    CheckpointFolder,
    incomplete,
    list_checkpoints,
    read_manifest,
    require_format,
)


def files_of(path: Path) -> list[Path]:
    """The files that were written into a checkpoint's folder, without others that are beside them.

    DamagedFile if one is a link, which may lead to any file of the user's, or is not a regular
    file.
    """
    folder = path / SHARDS
    listed = [
        path / "manifest.json",
        path / "state.pt",
        *(sorted(folder.iterdir()) if folder.is_dir() else ()),
    ]
    require_no_link(folder, *listed)
    found = {file: open_to_read(file) for file in listed}
    for handle in filter(None, found.values()):
        handle.close()
    return [file for file, handle in found.items() if handle is not None]


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, on the CPU, without the tensors in shards, which
    `load_sharded` adds.

    DamagedCheckpoint if it is incomplete, cut short or altered; CheckpointError if it cannot be
    read now: the disk fails, there is too little memory, its format is another.
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
        raise incomplete(path) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            Problem(
                str(path),
                f"the checkpoint was not loaded: {error}",
                expected="tensors and plain values",
            )
        ) from None
    except Exception as error:
        hint = (
            "the file may be intact: check storage, memory and the version of torch, then try again"
        )
        raise CheckpointError(
            Problem(str(path), f"the checkpoint cannot be read: {first_line(error)}", hint=hint)
        ) from error


def _read(path: Path) -> dict[str, Any]:
    written = str(read_manifest(path).get("sha256"))
    found = sha256(path / "state.pt")
    if found != written:
        reason = "the checkpoint was cut short or altered since it was written"
        hint = (
            "`samewise train` resumes from the newest intact one; with `eval` and `predict`, "
            "choose another with --checkpoint last or a step number"
        )
        raise DamagedCheckpoint(
            Problem(str(path), reason, f"sha256 {found[:16]}...", f"sha256 {written[:16]}...", hint)
        )
    state: dict[str, Any] = load_tensors(path / "state.pt")
    require_shape(path / "state.pt", state, {"shards?": {str: str}})
    require_format(path, state)
    for name, digest in state.get("shards", {}).items():
        if Path(name).name != name:
            raise damaged_file(
                path / "state.pt", f"it names {name!r}, which is not a file among its shards"
            )
        shard = path / SHARDS / name
        if not shard.exists() or sha256(shard) != digest:
            raise DamagedCheckpoint(
                Problem(
                    str(shard),
                    "is missing, or was altered since it was written",
                    expected=f"sha256 {digest[:16]}...",
                )
            )
    return state


def load_tensors(path: Path) -> Any:
    """Load a torch.save file of tensors and plain values.

    Anything else is refused, and nothing that the file names is created or called.

    pickle.UnpicklingError if there is something else in it, or some other exception if it is not
    such a file.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to disable the protection
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = (
            f"names {named[1]}, which may run code"
            if named
            else "contains more than tensors and plain values, or is damaged"
        )
        raise pickle.UnpicklingError(f"it {what}; it was not loaded") from None
    except RuntimeError as error:  # the same for a tar archive
        if "weights_only" not in str(error):
            raise
        raise pickle.UnpicklingError(
            "it is an archive, such as a bundle, which contains more than tensors (`tar "
            "-xf` unpacks it); it was not loaded"
        ) from None
    return found


def load(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, on the CPU.

    DamagedCheckpoint if it is incomplete, cut short or altered; CheckpointError if it cannot be
    read now.
    """
    return load_sharded(read(path), path)


def load_sharded(
    state: dict[str, Any],
    path: Path,
    empty: Callable[[list[int], torch.dtype], Tensor] | None = None,
) -> dict[str, Any]:
    """The result of `read` with the tensors in shards.

    `empty` creates each, or this process's shard. A CheckpointError if they cannot be read.
    """
    if "shards" not in state:
        return state
    try:
        return shards.load_shards(
            state,
            path / SHARDS,
            state["shards"],
            empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype)),
        )
    except Exception as error:
        raise CheckpointError(
            Problem(str(path / SHARDS), f"the shards cannot be read: {first_line(error)}")
        ) from error


def newest_sound(
    folder: Path, *, reader: Callable[[Path], dict[str, Any]] = load
) -> tuple[CheckpointFolder | None, dict[str, Any], list[Problem]]:
    """(checkpoint, its state, problems of newer ones); (None, {}, []) if there are no checkpoints.

    Only damage is a reason to take an older one: what cannot be read now may be read later.
    CheckpointError if none is sound, or if one that is newer than the newest sound one cannot be
    read and is not damaged.
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
        hint = (
            "check storage, memory and the version of samewise, then run the same command "
            f"again{older}; or start a new run with a different name="
        )
        raise CheckpointError(
            *problems,
            Problem(
                str(folder), "no checkpoint to resume from; nothing has been deleted", hint=hint
            ),
        )
    return None, {}, []
