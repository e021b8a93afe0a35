"""Writes a run's checkpoints, in the background if asked to, and prunes them.

`checkpoint` defines and reads them.

A folder is written under another name, synced and renamed, so one that has its name is whole.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import Problem, SamewiseError, TrainingError, first_line
from samewise.runner.records.digest import combine, state_sha256, tensor_digests
from samewise.runner.records.files import fsync_folder, set_aside, write_json
from samewise.runner.records.folder import SHARDS
from samewise.runner.records.kept_checkpoints import FORMAT, best_by, best_first, list_checkpoints


class Checkpoints:
    """Writes, prunes and reads the checkpoints of one run.

    Args:
        folder: `checkpoints/` of the run.
        settings: Which to keep, and whether to write in a thread: as `config.schema.Checkpoint`.
        modes: "min" or "max" for each metric by which the best are kept; the first says which is
            called best.
        lengths: `steps_per_epoch` and `total_steps` of the run, for runs that continue from a
            checkpoint.
    """

    def __init__(
        self, folder: Path, settings: Any, modes: Mapping[str, str], lengths: Mapping[str, int]
    ) -> None:
        self._folder, self._settings, self._modes, self._lengths = folder, settings, modes, lengths
        self._links = {
            name: best_by(name) if number else "best" for number, name in enumerate(modes)
        }
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def shards_folder(self, step: int) -> Path:
        """A new folder for the processes' shards of the next checkpoint, before `save`.

        A TrainingError if the previous one failed.
        """
        self.wait()
        folder = self._shards(step)
        shutil.rmtree(folder, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)
        folder.mkdir()
        return folder

    def _shards(self, step: int) -> Path:
        return self._folder / f".step-{step:08d}.shards.tmp"

    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write a checkpoint with the metrics of an evaluation at its step.

        In the background, a copy is made first so that training may continue.

        The state is named tensors and plain values; with `shards`, the SHA-256 of each file in
        `shards_folder`, it lacks the tensors that are there. TrainingError if this one, or the one
        before it, could not be written.
        """
        self.wait()
        if not self._settings.background:
            self._write(step, state, metrics)
            return
        self._thread = threading.Thread(
            target=self._write_and_remember,
            args=(step, copy_to_cpu(state), dict(metrics)),
            name="checkpoint",
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk; a TrainingError if it could not be written."""
        if self._thread:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error:
            raise error

    def raise_failure(self) -> None:
        """A TrainingError if the checkpoint that is written in the background could not be.

        It is not waited for.
        """
        if self._error:
            self.wait()

    def _write_and_remember(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        try:
            self._write(step, state, metrics)
        except BaseException as error:  # raised again in the main thread by `wait`
            self._error = error

    def _write(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        final = self._folder / f"step-{step:08d}"
        temporary = self._folder / f".step-{step:08d}.{os.getpid()}.tmp"
        try:
            # But not the run's folder: if it has vanished, it is not created again for half a run
            self._folder.mkdir(exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            torch.save({"format": FORMAT, **state}, temporary / "state.pt")
            with open(temporary / "state.pt", "rb") as handle:
                sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
                os.fsync(handle.fileno())
            weights = (
                None if "shards" in state else f"{combine(tensor_digests(state['model'])):016x}"
            )
            if "shards" in state:
                os.replace(self._shards(step), temporary / SHARDS)
            # The same for the same training
            content = state_sha256(
                {name: value for name, value in state.items() if name != "seconds"}
            )
            taken = {
                "step": step,
                **self._lengths,
                "sha256": sha256,
                "content": content,
                "weights": weights,
                "metrics": dict(metrics),
            }
            write_json(temporary / "manifest.json", {"format": FORMAT, **taken})
            before = set_aside(final, "replaced") if os.path.lexists(final) else None
            os.replace(temporary, final)
            fsync_folder(self._folder)
            if before:
                shutil.rmtree(before, ignore_errors=True)
            self._link("latest", final)
            self._prune()
        except (OSError, RuntimeError, SamewiseError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            reason = (
                error.strerror
                if isinstance(error, OSError) and error.strerror
                else first_line(error)
            )
            code = error.errno if isinstance(error, OSError) else None
            if isinstance(error, RuntimeError) and (
                code := _write_error(self._folder)
            ):  # torch.save reports only that its stream failed
                reason = os.strerror(code)
            hint = "run the same command again to resume"
            hint = f"{_WAYS_OUT[code]}, then {hint}" if code in _WAYS_OUT else hint
            raise TrainingError(
                Problem(str(final), f"the checkpoint cannot be written: {reason}", hint=hint)
            ) from error

    def _link(self, name: str, target: Path) -> None:
        temporary = self._folder / f".{name}.{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name)
        link = self._folder / name
        if link.is_dir() and not link.is_symlink():  # a copy that followed links
            print(
                f"warning: {link}: is a folder in the place of a link; moved to "
                f"{set_aside(link, 'replaced').name}",
                file=sys.stderr,
            )
        os.replace(temporary, link)

    def _prune(self) -> None:
        kept = list_checkpoints(self._folder)
        best = {name: best_first(kept, name, mode) for name, mode in self._modes.items()}
        wanted = {
            one.step
            for one in (
                *kept[-max(self._settings.keep_last, 1) :],
                *(one for by in best.values() for one in by[: self._settings.keep_best]),
            )
        }
        wanted |= {one.step for one in kept if one.metrics is None}  # it may be the best
        wanted |= {
            one.step
            for one in kept
            if self._settings.keep_every_steps and one.step % self._settings.keep_every_steps == 0
        }
        for name, link in self._links.items():
            if stays := [
                one for one in best[name] if one.step in wanted
            ]:  # with keep_best=0, the best of the remaining ones
                self._link(link, stays[0].path)
        for one in kept:
            if one.step not in wanted:
                shutil.rmtree(one.path, ignore_errors=True)

    def set_aside_after(self, step: int, *, sound: Collection[Path] = ()) -> list[Path]:
        """Rename checkpoints beyond `step` (damaged ones, and `sound` ones, if an older one is
        resumed), and report it.

        Remains of interrupted writes are removed.
        """
        for leftover in self._folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        return [
            set_aside(one.path, "untraced" if one.path in sound else "damaged")
            for one in list_checkpoints(self._folder)
            if one.step > step
        ]


_WAYS_OUT = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
}


def _write_error(folder: Path) -> int | None:
    """The error number if 64 MiB cannot be written.

    Called after torch.save has failed and its partial file is removed.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, 1 << 26)
    except OSError as error:
        return error.errno
    return None


def copy_to_cpu(value: Any) -> Any:
    """Copy a state to the CPU, independent of later steps."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copy_to_cpu(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_to_cpu(item) for item in value)
    return copy.copy(value)
