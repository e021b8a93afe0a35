"""Launchers start the runs of a sweep.

A launcher is a choice of the group `launcher`; a site's own belongs in a separate package.

A run is started by `python -m samewise.runner.launchers.job SWEEP NUMBER`, wherever that is: it
reads the point's config from the sweep's folder, trains, and leaves word of its beginning and its
end there. A launcher only brings that command to a machine, and says what it knows of it.
"""

from __future__ import annotations

import abc
import enum
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samewise.runner.records.sweep_folder import SweepFolder


@dataclass(frozen=True)
class Job:
    """One run to be started.

    Args:
        number: The point's.
        name: What a person calls it: `lr=0.1 seed=2`.
        sweep: The sweep's folder.
        threads: Cores that it keeps busy: the threads of all of its processes, and its loader's
            workers.
        processes: How many ranks it starts.
        wants_gpu: Whether it computes on CUDA devices if there are any: one per process.
        spread: On several machines: "each", `processes` on each of them; "whole", `processes` in
            all; None, it cannot be.
        environment: The variables that must be set before torch is imported, and those by which it
            reports to the sweeper.
    """

    number: int
    name: str
    sweep: Path
    threads: int = 1
    processes: int = 1
    wants_gpu: bool = False
    spread: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def arguments(self) -> list[str]:
        """The arguments of Python's interpreter."""
        return ["-P", "-m", "samewise.runner.launchers.job", str(self.sweep), str(self.number)]

    @property
    def command(self) -> list[str]:
        """The command on this machine, or on one that shares its file system."""
        return [sys.executable, *self.arguments]


class Standing(enum.StrEnum):
    """Whether a job waits, runs or is gone."""

    waiting = enum.auto()
    running = enum.auto()
    gone = enum.auto()


@dataclass(frozen=True)
class Seen:
    """What a launcher knows about a job.

    Args:
        standing: Where it stands.
        reason: The reason, if it is not obvious: "CANCELLED", "killed by SIGKILL".
        failed: It ended for a reason of its own, and would do so again.
    """

    standing: Standing
    reason: str = ""
    failed: bool = False


class Launcher(abc.ABC):
    """Starts jobs on machines."""

    detached: bool = False
    """Whether jobs go on without the process that has submitted them."""
    poll_s: float = 0.1
    """Seconds between two looks."""
    most: int | None = None
    """Jobs at a time; None: any number."""

    @abc.abstractmethod
    def open(self, sweep: SweepFolder) -> None:
        """Prepare for this sweep's jobs.

        Raises:
            ConfigError: it cannot be done here.
        """

    def room(self, running: Sequence[Job]) -> int | None:
        """How many more jobs may be submitted now; None: any number."""
        return None if self.most is None else self.most - len(running)

    @abc.abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Start or queue jobs; does not wait for them."""

    @abc.abstractmethod
    def look(self, numbers: Iterable[int]) -> dict[int, Seen]:
        """The state of jobs that this sweep has submitted, from this process or, with a detached
        launcher, an earlier one.
        """

    @abc.abstractmethod
    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        """Ask jobs to save and stop; or end them at once."""

    def close(self) -> None:
        """No more jobs will be submitted."""
