"""`best/METRIC`, logged to MLflow with each value of the monitored metric: the best so far, NaN before the first evaluation.

MLflow's table and compare page know a metric's last value only, and the compare page colours by the metric that a run had first: so this one is
logged before any other. It also stands first wherever MLflow sorts metrics by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from samewise.runner.tracking.journal import read_entries

PREFIX = "best/"


class Best:
    """The best value of a metric so far."""

    def __init__(self, monitor: str, *, mode: str) -> None:
        self.name = f"{PREFIX}{monitor}"
        self.value = math.nan
        self._monitor, self._mode = monitor, mode

    def take(self, metrics: Mapping[str, float]) -> bool:
        """Update with logged metrics, in order. Returns whether the monitored metric is among them."""
        value = metrics.get(self._monitor)
        if value is None:
            return False
        if is_better(value, self.value, self._mode):
            self.value = value
        return True


def is_better(value: float, best: float, mode: str) -> bool:
    """Whether a value is better than the best before it; any number is better than NaN."""
    return (math.isnan(best) and not math.isnan(value)) or (value < best if mode == "min" else value > best)


def best_logged(journal: Path, metric: str, *, mode: str, names: Collection[str], until: int) -> dict[str, float]:
    """The first best evaluation by a metric in a journal, with its step; empty if there is none.

    Args:
        journal: Of the run.
        metric: What is compared.
        mode: min or max.
        names: Of the evaluation's metrics: what else was logged with them is left out.
        until: The last step that counts.
    """
    found: dict[str, float] = {}
    for entry, _ in read_entries(journal):
        if metric in entry.metrics and entry.step <= until and (not found or is_better(entry.metrics[metric], found[metric], mode)):
            found = {**{name: value for name, value in entry.metrics.items() if name in names}, "step": entry.step}
    return found
