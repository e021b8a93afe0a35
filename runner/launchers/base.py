"""Where the runs of a sweep happen. A launcher is a choice of the group `launcher`; a site's own goes in a package of its own.

A run is started by `python -m samewise.runner.launchers.job SWEEP NUMBER`, wherever that is: it reads the point's config from the sweep's folder, trains, and
leaves word of its beginning and its end there. A launcher only brings that command to a machine, and says what it knows of it.
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
        threads: Cores that it keeps busy: the threads of all of its processes, and its loader's workers.
        processes: How many ranks it starts.
        wants_gpu: Whether it would compute on CUDA devices where there are some: one for each process.
        spread: On several machines: "each", `processes` on each of them; "whole", `processes` in all; None, it cannot be.
        environment: The variables that must be set before torch is imported, and those by which it reports to the sweeper.
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
        """Of Python's interpreter."""
        return ["-P", "-m", "samewise.runner.launchers.job", str(self.sweep), str(self.number)]

    @property
    def command(self) -> list[str]:
        """What to run on this machine, or on one with the same file system."""
        return [sys.executable, *self.arguments]


class Standing(enum.StrEnum):
    """What a launcher knows of a job."""

    waiting = enum.auto()
    running = enum.auto()
    gone = enum.auto()


@dataclass(frozen=True)
class Seen:
    """A launcher's word of a job.

    Args:
        standing: Where it stands.
        reason: Why, where that is not plain: "CANCELLED", "killed by SIGKILL".
        failed: It is gone for a reason of its own, and would be again.
    """

    standing: Standing
    reason: str = ""
    failed: bool = False


class Launcher(abc.ABC):
    """Brings jobs to machines."""

    detached: bool = False
    """Whether jobs go on without the process that has submitted them."""
    poll_s: float = 0.1
    """Seconds between two looks."""
    most: int | None = None
    """Jobs at a time; None: any number."""

    @abc.abstractmethod
    def open(self, sweep: SweepFolder) -> None:
        """Make ready for jobs of this sweep.

        Raises:
            ConfigError: it cannot be done here.
        """

    def room(self, running: Sequence[Job]) -> int | None:
        """How many more jobs may be submitted beside those that run; None: any number."""
        return None if self.most is None else self.most - len(running)

    @abc.abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Start them, or put them in a queue; returns at once."""

    @abc.abstractmethod
    def look(self, numbers: Iterable[int]) -> dict[int, Seen]:
        """What is known of jobs that this sweep has submitted, by this process or, where the launcher is detached, by an earlier one."""

    @abc.abstractmethod
    def cancel(self, numbers: Iterable[int], *, kill: bool = False) -> None:
        """Have them save and stop; or end them at once."""

    def close(self) -> None:
        """No more jobs come."""
