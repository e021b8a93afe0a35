"""The order of a monitored metric: which of two values is better is decided here alone."""

import math
from collections.abc import Mapping


def rank(value: float, mode: str) -> tuple[bool, float]:
    """Return a key by which values sort, the best first; NaN ranks below every number.

    Args:
        value: The metric's.
        mode: `min` or `max`.
    """
    return (True, 0.0) if math.isnan(value) else (False, value if mode == "min" else -value)


def best_of(
    best: Mapping[str, float], latest: Mapping[str, float], metric: str, mode: str
) -> Mapping[str, float]:
    """Return the better of two evaluations by a metric; of equal ones, the one before.

    Args:
        best: The best evaluation so far; empty: none.
        latest: The evaluation to compare.
        metric: Which of their metrics decides.
        mode: `min` or `max`.
    """
    return latest if not best or rank(latest[metric], mode) < rank(best[metric], mode) else best
