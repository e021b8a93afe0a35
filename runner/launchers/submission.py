"""Shared by launchers that submit to a cluster: the files that record submissions, and calls of a
cluster's commands.

SWEEP/HOME/
  0001.json      a submission: which point each of its indices is, and what the machines need to
  know cancelled/     an empty file for each job that was told to stop
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
    """A submitted job."""

    file: Path
    index: int
    given: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path, index: int) -> Submitted:
        """Read one job from a submission's file."""
        return cls(file, index, read_json(file, shapes.SUBMISSION) or {})

    @property
    def number(self) -> int:
        """The point's number."""
        return int(self.given["points"][self.index])

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.file.parents[1])

    @property
    def variables(self) -> Mapping[str, str]:
        """Its environment variables."""
        return self.given["variables"][self.index]

    def mark(self, name: str = "") -> Path:
        """The file that exists once the job was told to stop; `0001-3` unless a name is given."""
        return self.file.parent / "cancelled" / (name or f"{self.file.stem}-{self.index}")


def newest(home: Path, numbers: Iterable[int], *, key: str = "points") -> dict[int, Submitted]:
    """The latest job of each submitted point.

    A submission without `key` was not accepted by the cluster yet, and does not count.
    """
    found = dict[int, Submitted]()
    for file in sorted(home.glob("*.json")):
        given: Mapping[str, Any] = read_json(file, shapes.SUBMISSION) or {}
        found |= {
            point: Submitted(file, index, given)
            for index, point in enumerate(given["points"] if key in given else ())
        }
    return {number: found[number] for number in numbers if number in found}


def next_file(home: Path) -> Path:
    """The file for the next submission."""
    number = 1 + max(
        (int(file.stem) for file in home.glob("*.json") if file.stem.isdecimal()), default=0
    )
    return home / f"{number:04d}.json"


def group_jobs(
    jobs: Sequence[Job], needs: Callable[[Job], K], longest: int
) -> Iterator[tuple[K, Sequence[Job]]]:
    """Group jobs with the same needs, at most `longest` per group."""
    alike = dict[K, list[Job]]()
    for job in jobs:
        alike.setdefault(needs(job), []).append(job)
    return ((need, some) for need, several in alike.items() for some in chunks(several, longest))


def chunks(values: Sequence[T], longest: int) -> Iterator[Sequence[T]]:
    """Split values, in order, into lists of at most `longest`."""
    return (values[start : start + longest] for start in range(0, len(values), longest))


def too_small(least: Mapping[str, tuple[float | None, float]]) -> list[Problem]:
    """A problem for each setting, given as (value, lowest) by name, that is too small."""
    return [
        Problem(name, "is too small", value, f"at least {low}")
        for name, (value, low) in least.items()
        if value is not None and value < low
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
    """The last non-empty line; empty if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def describe_exit_code(code: int) -> str:
    """How a run's process ended if it left no record; a negative number is a signal."""
    return (
        f"killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code} without giving a reason"
    )
