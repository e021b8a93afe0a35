"""A run's folder: the names of its files, its lock, and the other runs of its experiment.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samewise.runner.errors import ConfigError, DamagedFile, Problem, TrainingError
from samewise.runner.records import locks, trust
from samewise.runner.records.files import require_no_link

APPENDED = ("metrics.jsonl", "system.jsonl", "trace.jsonl", "sender.log")
"""Files of a run that are appended to; the others are replaced."""

SHARDS = "shards"
"""The folder of sharded tensors in a checkpoint."""


def latest(first: Path, again: Mapping[str, int] | None = None) -> Path:
    """Return the folder of an experiment's latest run.

    That is the folder beside its first one (`-2`, `-3`, ...) with the highest number, if there are
    any.

    Args:
        first: The first folder.
        again: What `trained_again` returns for the folder around it; None: it is called.
    """
    number = (trained_again(first.parent) if again is None else again).get(first.name)
    return first.with_name(f"{first.name}-{number}") if number else first


def beside(first: Path) -> Path:
    """Return the folder in which to train an experiment again, beside the existing ones."""
    number = trained_again(first.parent).get(first.name, 0)
    return (
        first.with_name(f"{first.name}-{max(1, number) + 1}") if first.exists() or number else first
    )


def trained_again(folder: Path) -> dict[str, int]:
    """Return the highest number of the folders beside each experiment's first one, by its name."""
    parts = [name.rpartition("-") for name in (os.listdir(folder) if folder.is_dir() else ())]
    numbers = [(int(number), first) for first, _, number in parts if number.isdecimal()]
    return {first: number for number, first in sorted(numbers)}


class PathInFolder:
    """Path of a file in the folder of a run or a sweep."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: Any, kind: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """A run's folder and its files.

    It is `RUN_ROOT/<experiment name>/<first 12 digits of the fingerprint>/`, with `-2`, `-3`, ...
    for runs that are trained again.
    """

    path: Path

    config = PathInFolder("config.yaml")
    """The resolved config, loadable again."""
    environment = PathInFolder("environment.json")
    """Versions, hardware, threads, variables, git state, data fingerprints."""
    sources = PathInFolder("sources.json")
    """The user's code with which the run started, if any: digests, and names of the stored texts.
    """
    trace = PathInFolder("trace.jsonl")
    """A line for each step: the step, its loss as a hexadecimal number, digests."""
    metrics = PathInFolder("metrics.jsonl")
    """The journal of logged metrics."""
    system = PathInFolder("system.jsonl")
    """The journal of the machine's metrics."""
    checkpoints = PathInFolder("checkpoints")
    """A folder for each checkpoint, `step-XXXXXXXX`, and links to the `latest` and the `best`."""
    tags = PathInFolder("tags.json")
    """Tags that the run has earned: a mapping of names to text. Exists only if there are any."""
    notes = PathInFolder("notes.json")
    """The name and the tags that the user gave the run afterwards. Exists only if there are any."""
    artifacts = PathInFolder("artifacts")
    """Pictures and tables of evaluations. Files in it are uploaded to MLflow under the same
    relative path."""
    summary = PathInFolder("summary.json")
    """The result: metrics, SHA-256 of the weights, timings. Exists only once the run has ended."""
    failure = PathInFolder("failure.json")
    """Why the run failed: step, error, traceback. Exists only until it is resumed and ends well."""
    tracking = PathInFolder("tracking.json")
    """The MLflow run's id, and how much of the journal has been sent."""
    lock = PathInFolder(".lock")
    """A lock that the process which writes the run holds and signs."""
    sending = PathInFolder(".sending")
    """A lock that the process which sends the run's metrics to MLflow holds."""

    def create(self) -> None:
        """Create the folder.

        Raises:
            ConfigError: It cannot be written.
            DamagedFile: A file to be written is a link; or `checkpoints` is a link, and this user
                has neither made nor trusted the folder.
        """
        DamagedFile.raise_if(
            self.checkpoints.is_symlink() and not trust.is_signed(self.config),
            str(self.checkpoints),
            "is a link, which may lead to any folder of yours, and the run's folder is not "
            "signed by you",
            hint="remove it; or, if you made it, run `samewise eval "
            f"{shlex.quote(str(self.path))} --trust` to sign the folder",
        )
        # The other files are replaced, which writes through no link
        require_no_link(self.artifacts, self.lock, *(self.path / name for name in APPENDED))
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.artifacts.mkdir(exist_ok=True)
            self.lock.touch()
        except OSError as error:
            raise ConfigError(
                Problem(
                    "run_root",
                    f"cannot write into the run's folder: {error.strerror}",
                    str(self.path),
                    "a writable folder",
                    "set run_root=FOLDER",
                )
            ) from None

    @contextmanager
    def hold_lock(self) -> Generator[Callable[[], None]]:
        """Lock the folder for writing until this process ends or leaves the context.

        Yields:
            A function to call before each write, once the config is written. It raises a
            TrainingError if this folder or its content is gone, even if there is another folder of
            its name.

        Raises:
            ConfigError: Another process holds the lock.
        """
        try:
            with locks.hold(self.lock) as is_gone:

                def require() -> None:
                    # `rm -r RUN/*` leaves the lock, whose name begins with a dot, and no config
                    if is_gone() or not self.config.exists():
                        raise TrainingError(
                            Problem(
                                str(self.path),
                                "the run's folder is gone",
                                hint="it was deleted or moved during training; run the same command "
                                "again to train from the beginning",
                            )
                        )

                yield require
        except locks.LockHeld as held:
            raise ConfigError(
                Problem(
                    str(self.path),
                    f"this run is being written by {held}",
                    hint="wait for it, or stop it; then run the same command again to resume",
                )
            ) from held


def require_root(run_root: Path) -> None:
    """Raise a ConfigError if a run root does not exist."""
    ConfigError.raise_if(
        not run_root.is_dir(),
        "--run-root",
        "the folder does not exist",
        str(run_root),
        "the folder that run_root=FOLDER named in training",
    )
