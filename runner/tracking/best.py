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
        self._monitor, self._is_min = monitor, mode == "min"

    def take(self, metrics: Mapping[str, float]) -> bool:
        """Update with logged metrics, in order. Returns whether the monitored metric is among them."""
        value = metrics.get(self._monitor)
        if value is None:
            return False
        if math.isnan(self.value) or (value < self.value if self._is_min else value > self.value):
            self.value = value
        return True
