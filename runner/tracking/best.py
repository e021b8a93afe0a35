"""`best/METRIC`, logged to MLflow with each value of the monitored metric: the best so far, NaN before the first evaluation.

MLflow's table and compare page know a metric's last value only, and the compare page colours by the metric that a run had first: so this one is
logged before any other. It also stands first wherever MLflow sorts metrics by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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
