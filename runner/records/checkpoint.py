"""Checkpoints: named tensors and plain values, hashed, and loaded without running code.

    checkpoints/step-00000040/state.pt        tensors and plain values, by torch.save
    checkpoints/step-00000040/manifest.json   steps, SHA-256 of state.pt, weights' digest, metrics
    checkpoints/step-00000040/shards/         with checkpoint.sharded: the sharded tensors
    checkpoints/latest, checkpoints/best      links to folders, replaced atomically
    checkpoints/best-valid-loss               link to the best by a metric of `evaluate.also`

A folder is written under another name, synced and renamed, so a folder with that name is complete;
the hash shows later damage. A damaged folder is renamed, and no folder is removed because it could
not be read.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

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
from samewise.runner.records.digest import combine, tensor_digests
from samewise.runner.records.files import (
    damaged_file,
    open_to_read,
    require_downloaded,
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
    """List the files that belong to a checkpoint, and leave out any others in its folder.

    Raises:
        DamagedFile: A file is a link, which may lead to any file of the user's, or not a regular
            file.
    """
    folder = path / SHARDS
    paths = [
        path / "manifest.json",
        path / "state.pt",
        *(sorted(folder.iterdir()) if folder.is_dir() else ()),
    ]
    require_no_link(folder, *paths)
    handles = {file: open_to_read(file) for file in paths}
    for handle in filter(None, handles.values()):
        handle.close()
    return [file for file, handle in handles.items() if handle is not None]


def read(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint's folder, on the CPU, without the tensors in shards.

    `load_sharded` adds those.

    Raises:
        DamagedCheckpoint: It is incomplete, cut short or altered.
        CheckpointError: It cannot be read now: the disk fails, memory is short, or its format is
            another.
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
        raise CheckpointError(
            Problem(
                str(path),
                f"the checkpoint cannot be read: {first_line(error)}",
                hint="the file may be intact: check storage, memory and the version of torch, then try again",
            )
        ) from error


def _read(path: Path) -> dict[str, Any]:
    expected = str(read_manifest(path).get("sha256"))
    # Before torch reads the file, whose error would not say that it was altered
    actual = sha256(path / "state.pt")
    if actual != expected:
        require_downloaded(path / "state.pt")
        raise DamagedCheckpoint(
            Problem(
                str(path),
                "the checkpoint was cut short or altered since it was written",
                f"sha256 {actual[:16]}...",
                f"sha256 {expected[:16]}...",
                "`samewise train` resumes from the newest intact one; with `eval` and `predict`, "
                "choose another with --checkpoint last or a step number",
            )
        )
    state: dict[str, Any] = load_tensors(path / "state.pt")
    require_shape(path / "state.pt", state, {"shards?": {str: str}})
    require_format(path, state)
    for name, digest in state.get("shards", {}).items():
        # A received state may name any file of the user's
        if Path(name).name != name:
            raise damaged_file(
                path / "state.pt", f"it names {name!r}, which is not a file among its shards"
            )
        shard = path / SHARDS / name
        DamagedCheckpoint.raise_if(
            not shard.exists() or sha256(shard) != digest,
            str(shard),
            "is missing, or was altered since it was written",
            expected=f"sha256 {digest[:16]}...",
        )
    return state


def load_tensors(path: Path) -> Any:
    """Load a torch.save file of tensors and plain values; read its tensors when they are used.

    Nothing that the file names is created or called.

    Raises:
        pickle.UnpicklingError: The file contains something else.
        Exception: It is not such a file.
    """
    try:
        # Torch cannot map its format of before 2020 into memory
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except pickle.UnpicklingError as error:
        # torch's own message advises to turn the protection off
        global_name = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = (
            f"names {global_name[1]}, which may run code"
            if global_name
            else "contains more than tensors and plain values, or is damaged"
        )
        raise pickle.UnpicklingError(f"it {reason}") from None
    except RuntimeError as error:
        if "PytorchStreamReader" in str(error):
            # Without torch's guesses how that came about
            raise RuntimeError(
                f"it is cut short or damaged: {str(error).partition('. ')[0]}"
            ) from None
        # torch takes a tar archive for its oldest format, and gives the same advice
        if "weights_only" not in str(error):
            raise
        raise pickle.UnpicklingError(
            "it is an archive, such as a bundle, which contains more than tensors (`tar "
            "-xf` unpacks it)"
        ) from None


def load(path: Path) -> dict[str, Any]:
    """Return the whole state in a checkpoint's folder, on the CPU.

    Raises:
        DamagedCheckpoint: It is incomplete, cut short or altered.
        CheckpointError: It cannot be read now.
    """
    return load_sharded(read(path), path)


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return the model's state_dict in a checkpoint's folder; of a sound one, read nothing else.

    Raises:
        DamagedCheckpoint: It is incomplete, cut short or altered.
        CheckpointError: It cannot be read now.
    """
    # Whatever is wrong, `load` says it
    with suppress(Exception):
        # Refuses pipes, which torch would wait for
        files_of(path)
        weights = load_tensors(path / "state.pt")["model"]
        if f"{combine(tensor_digests(weights)):016x}" == read_manifest(path)["weights"]:
            return weights
    return load(path)["model"]


def load_sharded(
    state: dict[str, Any],
    path: Path,
    empty: Callable[[list[int], torch.dtype], Tensor] | None = None,
) -> dict[str, Any]:
    """Add the tensors in shards to the result of `read`.

    Args:
        state: The result of `read`.
        path: The checkpoint's folder.
        empty: Creates each tensor, or this process's shard of it, from its whole shape and dtype.

    Raises:
        CheckpointError: The shards cannot be read.
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
    """Return the newest intact checkpoint, its state, and the problems of newer ones.

    (None, {}, []) if there are no checkpoints. Only damage is a reason to take an older one: what
    cannot be read now may be read later.

    Raises:
        CheckpointError: No checkpoint is intact, or one that is newer than the newest intact one
            cannot be read and is not damaged.
    """
    problems, refused, older = list[Problem](), False, ""
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            state = reader(checkpoint.path)
        except DamagedCheckpoint as error:
            problems += (replace(problem, hint="") for problem in error.problems)
            continue
        except CheckpointError as error:
            problems += error.problems
            refused = True
            continue
        if not refused:
            return checkpoint, state, problems
        older = (
            f"; {checkpoint.path.name} can be read: to resume from it, move the newer ones "
            "elsewhere"
        )
        break
    if problems:
        raise CheckpointError(
            *problems,
            Problem(
                str(folder),
                "no checkpoint to resume from; nothing has been deleted",
                hint="check storage, memory and the version of samewise, then run the same command "
                f"again{older}; or start a new run with a different name=",
            ),
        )
    return None, {}, []
