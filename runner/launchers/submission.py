"""Record submissions to a cluster, and call a cluster's commands.

SWEEP/HOME/
  0001.json      a submission: the point of each of its indices, and what the machines need
  cancelled/     an empty file for each job that was told to stop
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from samewise.runner.errors import Problem
from samewise.runner.launchers.base import Job
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.sweep_folder import SweepFolder

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
PATIENCE_S = 60
"""Seconds that a cluster's command may take."""


@dataclass(frozen=True)
class Submitted:
    """A submitted job.

    Args:
        file: The submission's file.
        index: The job's index in the submission.
        record: Content of the file.
    """

    file: Path
    index: int
    record: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path, index: int) -> Submitted:
        """Read one job from a submission's file."""
        return cls(file, index, read_json(file, shapes.SUBMISSION) or {})

    @property
    def number(self) -> int:
        """The point's number."""
        return int(self.record["points"][self.index])

    @property
    def sweep(self) -> SweepFolder:
        """The sweep's folder."""
        return SweepFolder(self.file.parents[1])

    @property
    def variables(self) -> Mapping[str, str]:
        """The job's environment variables."""
        return self.record["variables"][self.index]

    def mark(self, name: str = "") -> Path:
        """Return the file that exists once the job was told to stop.

        Args:
            name: Name of the file; "" for the submission and index, `0001-3`.
        """
        return self.file.parent / "cancelled" / (name or f"{self.file.stem}-{self.index}")


def newest(home: Path, numbers: Iterable[int], *, key: str = "points") -> dict[int, Submitted]:
    """Return the latest job of each submitted point.

    Args:
        home: Folder of the submissions.
        numbers: Points to look for.
        key: Key that a submission has once the cluster has accepted it; others do not count.
    """
    latest = dict[int, Submitted]()
    # Later submissions have higher numbers, and replace earlier ones
    for file in sorted(home.glob("*.json")):
        submission: Mapping[str, Any] = read_json(file, shapes.SUBMISSION) or {}
        latest |= {
            point: Submitted(file, index, submission)
            for index, point in enumerate(submission["points"] if key in submission else ())
        }
    return {number: latest[number] for number in numbers if number in latest}


def next_file(home: Path) -> Path:
    """Return the file for the next submission."""
    number = 1 + max(
        (int(file.stem) for file in home.glob("*.json") if file.stem.isdecimal()), default=0
    )
    return home / f"{number:04d}.json"


def group_jobs(
    jobs: Sequence[Job], needs: Callable[[Job], K], longest: int
) -> Iterator[tuple[K, Sequence[Job]]]:
    """Group jobs with the same needs, at most `longest` per group."""
    # An array of SLURM, like a Job of Kubernetes, has one request of resources
    by_needs = dict[K, list[Job]]()
    for job in jobs:
        by_needs.setdefault(needs(job), []).append(job)
    return (
        (need, group) for need, matching in by_needs.items() for group in chunks(matching, longest)
    )


def chunks(values: Sequence[T], longest: int) -> Iterator[Sequence[T]]:
    """Split values, in order, into lists of at most `longest`."""
    return (values[start : start + longest] for start in range(0, len(values), longest))


def too_small(minimums: Mapping[str, tuple[float | None, float]]) -> list[Problem]:
    """Return a problem for each setting, as (value, lowest) by name, that is too small."""
    return [
        Problem(name, "is too small", value, f"at least {lowest}")
        for name, (value, lowest) in minimums.items()
        if value is not None and value < lowest
    ]


def call(
    *command: str, environment: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run a cluster's command; a timeout counts as a failure."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, 1, "", f"{command[0]} did not answer within {patience_s:g} s"
        )


def last_line(text: str) -> str:
    """Return the last non-empty line of a text; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def describe_exit_code(code: int) -> str:
    """Describe the end of a run's process that left no record; a negative code is a signal."""
    return (
        f"killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code} without giving a reason"
    )
