"""Checkpoints: named tensors and plain values, hashed, complete or absent, and loaded without running anything.

    checkpoints/step-00000040/state.pt         torch.save of tensors and plain values; loaded with weights_only=True
    checkpoints/step-00000040/manifest.json    step, sha256 of state.pt, digest of the weights, metrics
    checkpoints/step-00000040/shards/          with checkpoint.sharded, the tensors that the processes held in shards (`shards`)
    checkpoints/latest, checkpoints/best       links to folders, replaced atomically

A folder is written under another name, synced and renamed, so one that has its name is whole; what the disk did to it afterwards the hash tells.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samewise.runner import shards
from samewise.runner.digest import state_digest
from samewise.runner.errors import CheckpointError, Problem, SamewiseError, TrainingError
from samewise.runner.folder import fsync_folder, read_json, write_json

FORMAT = 1


@dataclass(frozen=True)
class Kept:
    """A checkpoint on disk."""

    path: Path
    step: int
    metrics: Mapping[str, float]

    @property
    def state_file(self) -> Path:
        return self.path / "state.pt"


class Checkpoints:
    """Writes, prunes and reads the checkpoints of one run.

    Args:
        folder: `checkpoints/` of the run.
        keep_last: How many of the newest to keep.
        keep_best: How many of the best to keep.
        keep_every_steps: Keep for good each whose step is a multiple of this.
        monitor: The metric that says which is best.
        mode: "min" or "max".
        background: Write in a thread.
    """

    def __init__(self, folder: Path, *, keep_last: int, keep_best: int, keep_every_steps: int | None, monitor: str, mode: str, background: bool) -> None:
        self._folder = folder
        self._keep_last = max(keep_last, 1)
        self._keep_best = keep_best
        self._keep_every = keep_every_steps
        self._monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def shards_folder(self, step: int) -> Path:
        """Where the processes are to write their shards of the next checkpoint before `save`: a new folder.

        Raises:
            TrainingError: the checkpoint before it could not be written.
        """
        self.wait()
        folder = self._shards(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _shards(self, step: int) -> Path:
        return self._folder / f".step-{step:08d}.shards.tmp"

    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write a checkpoint; in the background the state is copied first, so training may go on at once.

        Args:
            step: Where it was taken.
            state: Named tensors and plain values; with `shards`, the SHA-256 of each file in `shards_folder`, it lacks the tensors that are there.
            metrics: Of an evaluation at that step.

        Raises:
            TrainingError: this one, or the one before it, could not be written.
        """
        self.wait()
        state = copied(state) if self._background else state
        if not self._background:
            self._write(step, state, metrics)
            return
        self._thread = threading.Thread(target=self._write_and_remember, args=(step, state, dict(metrics)), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the checkpoint being written is on disk.

        Raises:
            TrainingError: it could not be written.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error

    def _write_and_remember(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        try:
            self._write(step, state, metrics)
        except BaseException as error:  # raised again in the main thread by `wait`
            self._error = error

    def _write(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        final = self._folder / f"step-{step:08d}"
        temporary = self._folder / f".step-{step:08d}.{os.getpid()}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            torch.save({"format": FORMAT, **state}, temporary / "state.pt")
            with open(temporary / "state.pt", "rb") as handle:
                sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
                os.fsync(handle.fileno())
            weights = None if "shards" in state else f"{state_digest(state['model']):016x}"
            if "shards" in state:
                os.replace(self._shards(step), temporary / shards.FOLDER)
            write_json(temporary / "manifest.json", {"format": FORMAT, "step": step, "sha256": sha256, "weights": weights, "metrics": dict(metrics)})
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            fsync_folder(self._folder)
            self._link("latest", final)
            self._prune()
        except (OSError, RuntimeError, SamewiseError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
            if isinstance(error, RuntimeError) and _disk_is_full(self._folder):  # torch.save says only that its stream failed
                reason = os.strerror(errno.ENOSPC)
            raise TrainingError(
                Problem(str(final), f"the checkpoint cannot be written: {reason}", hint="free some space, then give the same command again: it resumes")
            ) from error

    def _link(self, name: str, target: Path) -> None:
        temporary = self._folder / f".{name}.{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        os.replace(temporary, self._folder / name)

    def _prune(self) -> None:
        kept = found(self._folder)
        best = self._best_first(kept)
        if best:
            self._link("best", best[0].path)
        wanted = {*(one.step for one in kept[-self._keep_last :]), *(one.step for one in best[: self._keep_best])}
        for one in kept:
            if one.step not in wanted and not (self._keep_every and one.step % self._keep_every == 0):
                shutil.rmtree(one.path, ignore_errors=True)

    def _best_first(self, kept: list[Kept]) -> list[Kept]:
        scored = [one for one in kept if self._monitor in one.metrics]
        return sorted(scored, key=lambda one: (self._sign * one.metrics[self._monitor], one.step))

    def discard_after(self, step: int) -> None:
        """Remove what lies beyond `step`: damaged ones, when an older one is resumed from; and leftovers of interrupted writes."""
        for one in found(self._folder):
            if one.step > step:
                shutil.rmtree(one.path)
        for leftover in self._folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)


def _disk_is_full(folder: Path) -> bool:
    """Whether a checkpoint's worth of bytes cannot be written: asked once torch.save has failed and its part of a file is gone."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, 64 * 2**20)
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False


def found(folder: Path) -> list[Kept]:
    """The checkpoints in a folder, by step. Whether they are sound only `load` tells."""
    manifests = ((path, read_manifest(path)) for path in sorted(folder.glob("step-*")))
    return [Kept(path, int(path.name.removeprefix("step-")), manifest.get("metrics", {})) for path, manifest in manifests]


def named(folder: Path, which: str) -> Kept:
    """The checkpoint in a folder that `best`, `last` or a step names; the last where none is called best.

    Raises:
        CheckpointError: there is none, or no such one.
    """
    kept = found(folder)
    if not kept:
        raise CheckpointError(Problem(str(folder.parent), "the run has no checkpoint yet"))
    if which == "last":
        return kept[-1]
    if which == "best":
        link = folder / "best"
        return next((one for one in kept if link.exists() and one.path.samefile(link)), kept[-1])
    match = [one for one in kept if str(one.step) == which]
    if not match:
        steps = ", ".join(str(one.step) for one in kept)
        raise CheckpointError(Problem("--checkpoint", "there is no such checkpoint", which, f"best, last, or one of {steps}"))
    return match[0]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint's folder; empty where it is missing or unreadable (`load` says so by name)."""
    try:
        return read_json(path / "manifest.json") or {}
    except (ValueError, OSError):
        return {}


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, on the CPU, less the tensors that were written in shards: those `filled` adds.

    Raises:
        CheckpointError: it is missing, cut short or altered.
    """
    manifest = read_manifest(path)
    if not manifest or not (path / "state.pt").exists():
        raise CheckpointError(Problem(str(path), "the checkpoint is incomplete", expected="state.pt and manifest.json"))
    sha256 = shards.sha256(path / "state.pt")
    if sha256 != manifest.get("sha256"):
        written = str(manifest.get("sha256"))
        raise CheckpointError(
            Problem(
                str(path),
                "the checkpoint was cut short or altered since it was written",
                f"sha256 {sha256[:16]}...",
                f"sha256 {written[:16]}...",
                "`samewise train` goes on from the newest sound one; `eval` and `predict` take another by --checkpoint last, or a step",
            )
        )
    try:
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(Problem(str(path), f"the checkpoint cannot be read: {str(error).splitlines()[0]}")) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(Problem(str(path), "the checkpoint has another format", state.get("format"), str(FORMAT)))
    for name, written in state.get("shards", {}).items():
        shard = path / shards.FOLDER / name
        if not shard.exists() or shards.sha256(shard) != written:
            raise CheckpointError(Problem(str(shard), "is missing, or was altered since it was written", expected=f"sha256 {written[:16]}..."))
    return state


def load(path: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, on the CPU.

    Raises:
        CheckpointError: it is missing, cut short or altered.
    """
    return filled(read(path), path)


def filled(state: dict[str, Any], path: Path, empty: Callable[[list[int], torch.dtype], Tensor] | None = None) -> dict[str, Any]:
    """What `read` gave, with the tensors that were written in shards; `empty` makes each, or this process's shard of it.

    Raises:
        CheckpointError: the shards cannot be read.
    """
    if "shards" not in state:
        return state
    try:
        return shards.filled(state, path / shards.FOLDER, empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype)))
    except Exception as error:
        raise CheckpointError(Problem(str(path / shards.FOLDER), f"the shards cannot be read: {str(error).splitlines()[0]}")) from error


def newest_sound(folder: Path, *, reader: Callable[[Path], dict[str, Any]] = load) -> tuple[Kept | None, dict[str, Any], list[Problem]]:
    """(checkpoint, its state, what was wrong with newer ones); (None, {}, problems) where there is none to go on from."""
    problems: list[Problem] = []
    for one in reversed(found(folder)):
        try:
            return one, reader(one.path), problems
        except CheckpointError as error:
            problems += error.problems
    return None, {}, problems


def copied(value: Any) -> Any:
    """A copy on the CPU that later steps will not touch."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(item) for item in value)
    return copy.copy(value)
