"""`best/METRIC`, logged to MLflow with each value of the monitored metric: the best so far, NaN
before the first evaluation.

MLflow's table and compare page know a metric's last value only, and the compare page colours by the
metric that a run had first: so this one is logged before any other. It also stands first wherever
MLflow sorts metrics by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from samewise.runner.records.files import read_lines
from samewise.runner.records.ranking import best_of, rank
from samewise.runner.tracking.describing import key
from samewise.runner.tracking.journal import parse_line

PREFIX = "best/"


def column(monitor: str) -> str:
    """The name in MLflow of a monitored metric's best value."""
    return key(f"{PREFIX}{monitor}")


class Best:
    """The best value of a metric so far."""

    def __init__(self, monitor: str, *, mode: str) -> None:
        self.name = column(monitor)
        self.value = math.nan
        self._monitor, self._mode = monitor, mode

    def take(self, metrics: Mapping[str, float]) -> bool:
        """Update with logged metrics, in order.

        Returns whether the monitored metric is among them.
        """
        value = metrics.get(self._monitor)
        if value is None:
            return False
        self.value = min(value, self.value, key=partial(rank, mode=self._mode))
        return True


def best_so_far(
    journal: Path, modes: Mapping[str, str], *, until: float = math.inf
) -> dict[str, dict[str, float]]:
    """The first best evaluation by each metric in a journal: all that was logged with it, and its
    step. Of lines without one only the bytes are searched.

    Args:
        journal: Of the run.
        modes: The metrics, each with min or max. Those without an evaluation are left out of the
            result.
        until: The last step that counts.
    """
    found, marks = dict[str, Mapping[str, float]](), [json.dumps(name).encode() for name in modes]
    for _, line in read_lines(journal):
        if (
            any(mark in line for mark in marks)
            and (entry := parse_line(line)) is not None
            and entry.step <= until
        ):
            for name in modes.keys() & entry.metrics.keys():
                evaluation = {**entry.metrics, "step": entry.step}
                found[name] = best_of(found.get(name, {}), evaluation, name, modes[name])
    return {name: dict(found[name]) for name in modes if name in found}
