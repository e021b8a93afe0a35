"""A run's folder: names of its files, its lock, and writes that are never left incomplete.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samewise.runner.errors import ConfigError, DamagedFile, Problem, TrainingError
from samewise.runner.records import locks, trust
from samewise.runner.records.files import require_no_link

APPENDED = ("metrics.jsonl", "system.jsonl", "trace.jsonl", "sender.log")
"""Files of a run that are written on; the others are replaced."""

SHARDS = "shards"
"""The folder of sharded tensors in a checkpoint."""


def latest(first: Path) -> Path:
    """The folder of an experiment's latest run: its first folder, or the one beside it (`-2`, `-3`,
    ...) with the highest number.
    """
    numbers = _again(first)
    return first.with_name(f"{first.name}-{max(numbers)}") if numbers else first


def beside(first: Path) -> Path:
    """The folder in which to train an experiment again, beside the existing ones."""
    return (
        first.with_name(f"{first.name}-{max([1, *_again(first)]) + 1}")
        if first.exists() or _again(first)
        else first
    )


def _again(first: Path) -> list[int]:
    """The numbers of the folders in which an experiment was trained again."""
    return [
        int(number)
        for path in first.parent.glob(f"{first.name}-*")
        if (number := path.name.removeprefix(f"{first.name}-")).isdecimal()
    ]


class _In:
    """A path in a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, kind: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """`RUN_ROOT/<experiment name>/<first 12 digits of the fingerprint>/` and its files.

    With `-2`, `-3`, ... for runs trained again.
    """

    path: Path

    config = _In("config.yaml")
    """The resolved config, loadable again."""
    environment = _In("environment.json")
    """Versions, hardware, threads, variables, git state, data fingerprints."""
    sources = _In("sources.json")
    """The user's code with which the run started, if any: digests, and names of the kept texts."""
    trace = _In("trace.jsonl")
    """A line for each step: the step, its loss as a hexadecimal number, digests."""
    metrics = _In("metrics.jsonl")
    """The journal of what was logged."""
    system = _In("system.jsonl")
    """The journal of what was measured of the machine."""
    checkpoints = _In("checkpoints")
    """A folder for each checkpoint, `step-XXXXXXXX`, and links to the `latest` and the `best`."""
    tags = _In("tags.json")
    """Tags that the run has earned: a mapping of names to text. Exists only if there are some."""
    artifacts = _In("artifacts")
    """Pictures and tables of evaluations. Whatever is here is uploaded to MLflow under the same
    relative path."""
    summary = _In("summary.json")
    """The result: metrics, SHA-256 of the weights, timings. Exists only once the run has ended."""
    failure = _In("failure.json")
    """Why the run failed: step, error, traceback. Exists only until it is resumed and ends well."""
    tracking = _In("tracking.json")
    """The MLflow run's id, and how much of the journal has been sent."""
    lock = _In(".lock")
    """A lock: held, and signed, by the process that writes the run."""
    sending = _In(".sending")
    """A lock: held by the process that sends the run's metrics to MLflow."""

    def create(self) -> None:
        """Make the folder; ConfigError if it cannot be written.

        DamagedFile if a file to be written is a link; or `checkpoints` is one, in a folder that
        this user has neither made nor trusts.
        """
        if self.checkpoints.is_symlink() and not trust.is_signed(self.config):
            words = (
                "is a link, which may lead to any folder of yours, and the run's folder is not "
                "signed by you"
            )
            hint = (
                "remove it; or, if you made it, run `samewise eval "
                f"{shlex.quote(str(self.path))} --trust` to sign the folder"
            )
            raise DamagedFile(Problem(str(self.checkpoints), words, hint=hint))
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
        """Lock the folder for writing.

        The lock ends with the process, however that ends. ConfigError if another process holds it.

        Yields a function to be called before anything that counts is written, once the config is:
        it raises a TrainingError where this folder or what was in it is gone, though there may be
        another of its name.
        """
        try:
            with locks.hold(self.lock) as is_gone:

                def require() -> None:
                    if (
                        is_gone() or not self.config.exists()
                    ):  # config.yaml: after `rm -r RUN/*`, which leaves the lock
                        hint = (
                            "it was deleted or moved during training; run the same command "
                            "again to train from the beginning"
                        )
                        raise TrainingError(
                            Problem(str(self.path), "the run's folder is gone", hint=hint)
                        )

                yield require
        except locks.LockHeld as held:
            hint = "wait for it, or stop it; then run the same command again to resume"
            raise ConfigError(
                Problem(str(self.path), f"this run is being written by {held}", hint=hint)
            ) from held


def require_root(run_root: Path) -> None:
    """Raise a ConfigError if a run root does not exist."""
    if not run_root.is_dir():
        raise ConfigError(
            Problem(
                "--run-root",
                "the folder does not exist",
                str(run_root),
                "the folder that run_root=FOLDER named in training",
            )
        )
