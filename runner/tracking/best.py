"""Logs `best/METRIC` to MLflow: the best value of the monitored metric so far, at first NaN.

MLflow's table and compare page know a metric's last value only, and the compare page colours by the
metric that a run had first: so this one is logged before any other. It is also the first wherever
MLflow sorts metrics by name.
"""

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
    """Return the name in MLflow of a monitored metric's best value."""
    return key(f"{PREFIX}{monitor}")


class Best:
    """The best value of a metric so far."""

    def __init__(self, monitor: str, *, mode: str) -> None:
        self.name = column(monitor)
        self.value = math.nan
        self._monitor, self._mode = monitor, mode

    def take(self, metrics: Mapping[str, float]) -> bool:
        """Update with metrics in the order of logging.

        Returns:
            Whether the monitored metric is among them.
        """
        value = metrics.get(self._monitor)
        if value is None:
            return False
        # NaN ranks last, so that the first number takes its place
        self.value = min(value, self.value, key=partial(rank, mode=self._mode))
        return True


def best_so_far(
    journal: Path, modes: Mapping[str, str], *, until: float = math.inf
) -> dict[str, dict[str, float]]:
    """Return the first best evaluation by each metric in a journal.

    Args:
        journal: The run's journal.
        modes: The metrics, each with min or max.
        until: The last step that counts.

    Returns:
        By metric, all values that were logged with it, and `step`. Metrics without an evaluation
        are left out.
    """
    best = dict[str, Mapping[str, float]]()
    # Most lines have no evaluation: they are searched as bytes, and not parsed
    marks = [json.dumps(name).encode() for name in modes]
    for _, line in read_lines(journal):
        if (
            any(mark in line for mark in marks)
            and (entry := parse_line(line)) is not None
            and entry.step <= until
        ):
            for name in modes.keys() & entry.metrics.keys():
                evaluation = {**entry.metrics, "step": entry.step}
                best[name] = best_of(best.get(name, {}), evaluation, name, modes[name])
    return {name: dict(best[name]) for name in modes if name in best}
