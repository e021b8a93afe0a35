"""What launchers that submit to a cluster share: the files in which submissions are written down, and the commands and settings of clusters.

SWEEP/HOME/
  0001.json      a submission: which point each of its indices is, and what the machines need to know
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
    """A job as it was submitted."""

    file: Path
    index: int
    given: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path, index: int) -> Submitted:
        """One job of a submission's file."""
        return cls(file, index, read_json(file, shapes.SUBMISSION) or {})

    @property
    def number(self) -> int:
        """The point's."""
        return int(self.given["points"][self.index])

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.file.parents[1])

    @property
    def variables(self) -> Mapping[str, str]:
        """Of its environment."""
        return self.given["variables"][self.index]

    def mark(self, name: str = "") -> Path:
        """There once the job was told to stop; `0001-3` if not given a name."""
        return self.file.parent / "cancelled" / (name or f"{self.file.stem}-{self.index}")


def newest(home: Path, numbers: Iterable[int], *, key: str = "points") -> dict[int, Submitted]:
    """The newest job of each point that has been submitted; a submission without `key` does not count, as one that the cluster has not taken yet."""
    found = dict[int, Submitted]()
    for file in sorted(home.glob("*.json")):
        given: Mapping[str, Any] = read_json(file, shapes.SUBMISSION) or {}
        found |= {point: Submitted(file, index, given) for index, point in enumerate(given["points"] if key in given else ())}
    return {number: found[number] for number in numbers if number in found}


def next_file(home: Path) -> Path:
    """For one more submission."""
    number = 1 + max((int(file.stem) for file in home.glob("*.json") if file.stem.isdecimal()), default=0)
    return home / f"{number:04d}.json"


def group_jobs(jobs: Sequence[Job], needs: Callable[[Job], K], longest: int) -> Iterator[tuple[K, Sequence[Job]]]:
    """The jobs that need the same, together, at most `longest` of them."""
    alike = dict[K, list[Job]]()
    for job in jobs:
        alike.setdefault(needs(job), []).append(job)
    return ((need, some) for need, several in alike.items() for some in pieces(several, longest))


def pieces(values: Sequence[T], longest: int) -> Iterator[Sequence[T]]:
    """The values in their order, at most `longest` at a time."""
    return (values[start : start + longest] for start in range(0, len(values), longest))


def too_small(least: Mapping[str, tuple[float | None, float]]) -> list[Problem]:
    """A problem for each setting, by its name (value, lowest), that is less than it may be."""
    return [Problem(name, "is too small", value, f"at least {low}") for name, (value, low) in least.items() if value is not None and value < low]


def call(*command: str, environment: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """A cluster's command; one that takes too long has failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patience_s, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} did not answer within {patience_s:g} s")


def last_line(text: str) -> str:
    """The last line that is not empty; empty where there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def unexplained_exit(code: int) -> str:
    """How a run's process ended that has left no word; a signal as a negative number."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} without giving a reason"
