"""Define the interface of launchers, which start the runs of a sweep.

A launcher is a choice of the group `launcher`; a site's own launcher belongs in a separate package.

Every launcher starts a run with the same command, `python -m samewise.runner.launchers.job SWEEP
NUMBER`. That process reads the point's config from the sweep's folder, trains, and records its
start and its end there. A launcher only brings the command to a machine and reports the job's
state.
"""

import abc
import enum
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samewise.runner.records.sweep_folder import SweepFolder


@dataclass(frozen=True)
class Job:
    """One run to start.

    Args:
        number: The point's number.
        name: The label that people see: `lr=0.1 seed=2`.
        sweep: The sweep's folder.
        threads: Cores that the job keeps busy: the threads of all its processes, and its loader's
            workers.
        processes: Number of ranks that the job starts.
        wants_gpu: Whether the job computes on CUDA devices if there are any, one per process.
        spread: Distribution over several machines: "each" for `processes` on every machine, "whole"
            for `processes` in total, None if the job needs a single machine.
        environment: Variables to set before torch is imported, and those with which the job reports
            to the sweeper.
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
        """Arguments for the Python interpreter."""
        # With -P, modules in the current folder are not code
        return ["-P", "-m", "samewise.runner.launchers.job", str(self.sweep), str(self.number)]

    @property
    def command(self) -> list[str]:
        """Command line on this machine, or on one that shares its file system."""
        return [sys.executable, *self.arguments]


class Standing(enum.StrEnum):
    """Whether a job waits, runs or has ended."""

    waiting = enum.auto()
    running = enum.auto()
    ended = enum.auto()


@dataclass(frozen=True)
class JobState:
    """State of a job, as its launcher sees it.

    Args:
        standing: Whether the job waits, runs or has ended.
        reason: The reason, if it is not obvious: "CANCELLED", "killed by SIGKILL".
        failed: Whether the job failed by itself, and would fail again.
    """

    standing: Standing
    reason: str = ""
    failed: bool = False


class Launcher(abc.ABC):
    """Starts jobs on machines."""

    detached: bool = False
    """Whether jobs outlive the process that submitted them."""
    poll_s: float = 0.1
    """Seconds between two looks at the jobs."""
    most: int | None = None
    """Maximum number of jobs at a time; None for any number."""

    @abc.abstractmethod
    def open(self, sweep: SweepFolder) -> None:
        """Prepare to start this sweep's jobs.

        Args:
            sweep: The sweep's folder.

        Raises:
            ConfigError: This machine cannot start the jobs.
        """

    def room(self, running: Sequence[Job]) -> int | None:
        """Return how many more jobs may be submitted now; None for any number.

        Args:
            running: Jobs that have not ended.
        """
        return None if self.most is None else self.most - len(running)

    @abc.abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Start or queue jobs, without waiting for them."""

    @abc.abstractmethod
    def look(self, numbers: Iterable[int]) -> dict[int, JobState]:
        """Return the states of submitted jobs by number.

        Args:
            numbers: Jobs to look at. With a detached launcher, an earlier process may have
                submitted them.
        """

    @abc.abstractmethod
    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        """Ask jobs to save and stop.

        Args:
            numbers: Jobs to stop.
            kill: End them at once instead.
        """

    def close(self) -> None:
        """Release resources; no more jobs will be submitted."""
