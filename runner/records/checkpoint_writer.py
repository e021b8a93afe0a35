"""Writes a run's checkpoints, in the background if asked to, and prunes them.

`checkpoint` defines and reads them.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import Problem, SamewiseError, TrainingError, first_line, make_room
from samewise.runner.records.digest import combine, state_sha256, tensor_digests, tensors_in
from samewise.runner.records.files import fsync_folder, set_aside, write_json
from samewise.runner.records.folder import SHARDS
from samewise.runner.records.kept_checkpoints import FORMAT, best_by, best_first, list_checkpoints


class Checkpoints:
    """Writes and prunes the checkpoints of one run.

    Args:
        folder: `checkpoints/` of the run.
        settings: Which to keep, and whether to write in a thread: as `config.schema.Checkpoint`.
        modes: "min" or "max" for each metric by which the best are kept. The link of the first
            metric is `best`.
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
        self._written: Future[None] | None = None

    def shards_folder(self, step: int) -> Path:
        """Create the folder for the processes' shards of the next checkpoint, before `save`.

        Raises:
            TrainingError: The previous checkpoint could not be written.
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
        """Write a checkpoint with the metrics of the evaluation at its step.

        To write in the background, it copies the state first, so that training may continue. It
        does not return before a state too large to copy is on disk.

        Args:
            step: The step, from 1.
            state: Named tensors and plain values. With `shards`, the SHA-256 of each file in
                `shards_folder`, it lacks the tensors in those files.
            metrics: The evaluation's metrics; empty without an evaluation.

        Raises:
            TrainingError: This checkpoint, or the one before it, could not be written.
        """
        # The checkpoint before must be complete, and its failure is raised here
        self.wait()
        if not self._settings.background or not is_copied(state):
            self._write(step, state, metrics)
            return
        writer = ThreadPoolExecutor(1, "checkpoint")
        self._written = writer.submit(self._write, step, copy_to_cpu(state), dict(metrics))
        # The thread ends once it has written: an idle one would be in the way of every fork
        writer.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the checkpoint is on disk; raise a TrainingError if it cannot be written."""
        written, self._written = self._written, None
        if written:
            written.result()

    def raise_failure(self) -> None:
        """Raise a TrainingError if writing in the background has failed; do not wait for it."""
        if self._written and self._written.done():
            self.wait()

    def _write(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        final = self._folder / f"step-{step:08d}"
        temporary = self._folder / f".step-{step:08d}.{os.getpid()}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            retry(final, partial(self._fill, temporary, step, state, metrics))
            retry(final, partial(self._publish, temporary, final))
        except (OSError, RuntimeError, SamewiseError) as error:
            # Before the partial files are removed, which makes room
            reason, code = _reason(error)
            remedy = (
                "raise the limit on the size of files (ulimit -f)"
                if code == errno.EFBIG
                else make_room(code, self._folder)
            )
            shutil.rmtree(temporary, ignore_errors=True)
            raise TrainingError(
                Problem(
                    str(final),
                    f"the checkpoint cannot be written: {reason}",
                    hint=", then ".join(
                        filter(None, [remedy, "run the same command again to resume"])
                    ),
                )
            ) from error

    def _fill(
        self, folder: Path, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        # Without parents: if the run's folder has vanished, it is not made again for half a run
        self._folder.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        with _HashedFile(FileIO(folder / "state.pt", "wb")) as file:
            torch.save({"format": FORMAT, **state}, file)
            os.fsync(file.fileno())
        weights = None if "shards" in state else f"{combine(tensor_digests(state['model'])):016x}"
        # Two runs of the same training have the same digest, whatever time they took
        content = state_sha256({name: value for name, value in state.items() if name != "seconds"})
        manifest = {
            "step": step,
            **self._lengths,
            "sha256": file.sha256.hexdigest(),
            "content": content,
            "weights": weights,
            "metrics": dict(metrics),
        }
        write_json(folder / "manifest.json", {"format": FORMAT, **manifest})
        if self._shards(step).is_dir():
            os.replace(self._shards(step), folder / SHARDS)

    def _publish(self, written: Path, final: Path) -> None:
        # It is gone if only what follows has to be done again
        if written.exists():
            # os.replace cannot replace a folder with files in it
            replaced = set_aside(final, "replaced") if os.path.lexists(final) else None
            os.replace(written, final)
            if replaced:
                shutil.rmtree(replaced, ignore_errors=True)
        # Durable before a link leads there and older checkpoints are removed
        fsync_folder(self._folder)
        self._link("latest", final)
        self._prune()

    def _link(self, name: str, target: Path) -> None:
        temporary = self._folder / f".{name}.{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        # Relative, so that the run's folder can be moved
        temporary.symlink_to(target.name)
        link = self._folder / name
        if link.is_dir() and not link.is_symlink():
            # A copy of the run that followed links has a folder here
            print(
                f"warning: {link}: is a folder, not a link; moved to "
                f"{set_aside(link, 'replaced').name}",
                file=sys.stderr,
            )
        os.replace(temporary, link)

    def _prune(self) -> None:
        checkpoints = list_checkpoints(self._folder)
        best = {name: best_first(checkpoints, name, mode) for name, mode in self._modes.items()}
        every = self._settings.keep_every_steps
        kept_steps = {
            checkpoint.step
            for checkpoint in (
                *checkpoints[-max(self._settings.keep_last, 1) :],
                *(x for ranking in best.values() for x in ranking[: self._settings.keep_best]),
                # Without readable metrics, any of them may be the best
                *(x for x in checkpoints if x.metrics is None),
                *(x for x in checkpoints if every and x.step % every == 0),
            )
        }
        for name, link in self._links.items():
            # With keep_best=0 the link leads to the best of those that remain
            if remaining := [
                checkpoint for checkpoint in best[name] if checkpoint.step in kept_steps
            ]:
                self._link(link, remaining[0].path)
        for checkpoint in checkpoints:
            if checkpoint.step not in kept_steps:
                shutil.rmtree(checkpoint.path, ignore_errors=True)

    def set_aside_after(self, step: int, *, sound: Collection[Path] = ()) -> list[Path]:
        """Rename checkpoints beyond `step`, and remove what interrupted writes left.

        Checkpoints in `sound` are intact, but the run resumes from an older one; the others are
        damaged.

        Returns:
            The new paths.
        """
        for leftover in self._folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        return [
            set_aside(checkpoint.path, "untraced" if checkpoint.path in sound else "damaged")
            for checkpoint in list_checkpoints(self._folder)
            if checkpoint.step > step
        ]


class _HashedFile(BufferedWriter):
    """A file that hashes what is written, so that it need not be read again."""

    def __init__(self, raw: FileIO) -> None:
        super().__init__(raw)
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def retry(path: Path, write: Callable[[], None]) -> None:
    """Write something and, if that fails, write it again after a moment.

    Network file systems fail for a moment, for example while a server of Lustre is replaced.
    """
    try:
        write()
    except (OSError, RuntimeError, SamewiseError) as error:
        reason, _ = _reason(error)
        print(
            f"warning: {path}: writing failed, and is tried again in {_PAUSE_S:g} s: {reason}",
            file=sys.stderr,
        )
        time.sleep(_PAUSE_S)
        write()


_PAUSE_S = 3.0


def _reason(error: Exception) -> tuple[str, int | None]:
    """Return why writing failed, in the system's words, and the error number."""
    # After the system's error, torch.save may raise another
    code = getattr(error, "errno", None) or getattr(error.__context__, "errno", None)
    return os.strerror(code) if code else first_line(error), code


LARGEST_COPY = 1 << 30
"""Bytes of a state in the host's memory up to which it is copied, to be written in the background.
"""


def is_copied(state: Any) -> bool:
    """Whether a state is copied before it is written in the background.

    A copy of a large state could exceed the memory that holds the state already; what is on a
    device is copied to the host in any case.
    """
    return sum(tensor.nbytes for tensor in tensors_in(state) if tensor.is_cpu) <= LARGEST_COPY


def copy_to_cpu(value: Any) -> Any:
    """Copy a state to the CPU, so that later steps do not change it."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copy_to_cpu(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_to_cpu(item) for item in value)
    return copy.copy(value)
