"""Statistics of paired differences from few runs, which hold however often one looks.

After each look, more pairs may follow. Every look spends a part of the rate of false claims (alpha
spending: K. Lan and D. DeMets 1983, Biometrika 70, 659), which gives a boundary for the test
statistic. The interval orders outcomes by the look at which the boundary was crossed (A. Tsiatis,
G. Rosner and C. Mehta 1984, Biometrics 40, 797): it has its coverage at the look at which a study
stops, and leaves out zero only if the boundary is crossed. Student's t becomes the normal deviate
of the same level (S. Pocock 1977, Biometrika 64, 191).

Imports no other module of samewise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

LEVEL = 0.05
"""Rate of false claims of a study, over all its looks."""
PLANNED = 0.9
"""Share of what is left of the level that a plan of looks spends. The rest is for later plans."""
POWER = 0.8
MOST_PAIRS = 1000

# In deviations of the sum at the first look, and at the last
_STEP, _REACH = 0.04, 8.0
_SHARE = re.compile(r"(^|[/_])(accuracy|top\d+|precision|recall|f1|map)$")

Looks = tuple[tuple[int, float], ...]
"""Number of pairs at each look, increasing, and the share of the level spent by then."""


def is_share(metric: str) -> bool:
    """Whether a metric is from 0 to 1, by its name."""
    return bool(_SHARE.search(metric))


@dataclass(frozen=True)
class Estimate:
    """A mean difference of pairs.

    Args:
        pairs: Number of pairs.
        mean: Mean of the differences.
        deviation: Their standard deviation (n - 1); NaN for one pair.
        low: Lower limit of the mean's interval; minus infinity for one pair.
        high: Upper limit.
        p: Two-sided p-value, adjusted for the looks; 1 for one pair.
        effect: Mean over deviation, with Hedges' correction for few pairs; NaN for one pair.
        wins: Number of pairs with a difference above zero.
    """

    pairs: int
    mean: float
    deviation: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    p: float = 1.0
    effect: float = math.nan
    wins: int = 0

    @property
    def sign(self) -> int:
        """1 or -1 if the interval lies above or below zero; otherwise 0."""
        return int(self.low > 0) - int(self.high < 0)


def estimate(
    first: Sequence[float],
    second: Sequence[float],
    looks: Looks = (),
    *,
    level: float = LEVEL,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Estimate the mean of `first - second` with an interval.

    Args:
        first: float[n], values of one side, in any unit.
        second: float[n], values of the other, each of the same seed.
        looks: Looks up to this one, the last with n pairs; (): this look alone spends the level.
        level: Rate of false claims. The interval's coverage is 1 minus what the looks have spent.
        bounds: Least and greatest possible value.
    """
    import numpy as np
    from scipy.stats import t

    a, b = np.asarray(first, float), np.asarray(second, float)
    differences = a - b
    n, mean, wins = len(a), round(float(differences.mean()), 12), int((differences > 0).sum())
    if n < 2:
        return Estimate(n, mean, wins=wins)
    deviation = float(differences.std(ddof=1))
    if not differences.any():
        return Estimate(n, 0.0, 0.0, 0.0, 0.0, effect=0.0)
    # Differences of a coarse metric may be equal by chance
    values = np.unique(np.concatenate([a, b]).round(12))
    scale = max(deviation, float(np.diff(values).min()) / math.sqrt(12))
    low, high, p = _limits(mean, scale, looks or ((n, 1.0),), level)
    if n > 2:
        # Student's interval misses on the side of a long tail (N. Johnson 1978, JASA 73, 536). Half
        # of the shift, as few pairs show little of the skewness
        cubes = float(((differences - mean) ** 3).sum()) * n / ((n - 1) * (n - 2))
        shift = cubes / scale**2 / (12 * n) * (1 + 2 * 1.96**2)
        low, high = low + min(shift, 0.0), high + max(shift, 0.0)
    (low_a, high_a), (low_b, high_b) = (
        (max(float(x.mean()) - margin, bounds[0]), min(float(x.mean()) + margin, bounds[1]))
        for x in (a, b)
        for margin in [float(t.isf(LEVEL / 2, n - 1) * x.std(ddof=1)) / math.sqrt(n)]
    )
    # Both means lie within the bounds
    low = max(low, bounds[0] - high_b, low_a - bounds[1])
    high = min(high, bounds[1] - low_b, high_a - bounds[0])
    effect = mean / scale * (1 - 3 / (4 * n - 5))
    return Estimate(n, mean, deviation, low, high, p, effect, wins)


def add_look(looks: Looks, pairs: int, plan: tuple[int, float] = (0, 0.0), last: int = 0) -> Looks:
    """Return the looks of a study with one more.

    Args:
        looks: The looks so far.
        pairs: Number of pairs at the new look. With no more than before the plan, it spends
            nothing.
        plan: The last look before the present plan; (0, 0.0) if this is the first plan.
        last: Number of pairs at the plan's last look, which spends all that the plan may spend;
            at most `pairs`: this is it.
    """
    before, spent = plan
    if pairs > before:
        # What is spent grows evenly with the pairs
        share = min(1.0, (pairs - before) / max(1, last - before))
        spent += PLANNED * (1 - spent) * share
    return (*(x for x in looks if x[0] < pairs), (pairs, spent))


def holm_levels(p_values: Sequence[float]) -> list[float]:
    """Return the level at which to judge each of several comparisons, so that all hold together.

    S. Holm 1979, Scand. J. Statist. 6, 65: by ascending p-value until the first that is not
    significant; its level is that of all after it.

    Args:
        p_values: That of each comparison.
    """
    count = len(p_values)
    order = sorted(range(count), key=p_values.__getitem__)
    levels = [LEVEL / (count - place) for place in range(count)]
    last = next((x for x in range(count) if p_values[order[x]] >= levels[x]), count - 1)
    return [levels[min(order.index(number), last)] for number in range(count)]


def pairs_needed(now: Estimate, looks: Looks = (), level: float = LEVEL) -> int | None:
    """Return how many more pairs would settle a difference, with a chance of 80 %.

    Args:
        now: The estimate so far; its mean and deviation are taken as the true ones.
        looks: The looks so far.
        level: As in `estimate`.

    Returns:
        The number; None if it is more than 1000, or unknown from one pair.
    """
    import numpy as np
    from scipy.stats import norm, t

    spent = looks[-1][1] if looks else 0.0
    half = level * PLANNED * (1 - spent) / 2
    counts = np.arange(now.pairs + 1, MOST_PAIRS + now.pairs)
    effect = abs(now.mean) / (now.deviation or math.nan)
    settles = effect * np.sqrt(counts) > t.isf(half, counts - 1) + norm.ppf(POWER)
    return int(settles.argmax()) + 1 if settles.any() else None


def _limits(mean: float, scale: float, looks: Looks, level: float) -> tuple[float, float, float]:
    """Return both limits and the p-value."""
    from scipy.optimize import brentq
    from scipy.stats import norm, t

    n, half = looks[-1][0], level * looks[-1][1] / 2
    error, root = scale / math.sqrt(n), math.sqrt(n)
    normal, student = norm(), t(n - 1)

    def convert(value: float, source: Any, target: Any) -> float:
        """Return the quantile of `target` at the level of a quantile of `source`."""
        return math.copysign(float(target.isf(source.sf(abs(value)))), value)

    deviate = max(-_REACH, min(_REACH, convert(mean / error, student, normal)))
    tail = _walk(looks, level)[1]

    def limit(side: int) -> float:
        def excess(drift: float) -> float:
            return tail(drift / root, side * deviate) - half

        drift: Any = brentq(excess, -abs(deviate) - _REACH, abs(deviate) + _REACH)
        return mean - error * convert(deviate - side * drift, normal, student)

    tails = tail(0.0, deviate), tail(0.0, -deviate)
    return limit(1), limit(-1), min(1.0, 2 * min(tails))


def boundaries(looks: Looks, level: float = LEVEL) -> list[float]:
    """Return the normal deviate at each look beyond which a difference is claimed."""
    return _walk(looks, level)[0]


@lru_cache(maxsize=64)
def _walk(looks: Looks, level: float) -> tuple[list[float], Callable[[float, float], float]]:
    """Follow a Brownian motion from look to look until it crosses a boundary.

    Returns:
        The boundaries; and the chance to cross the upper one before the last look, or to end above
        a deviate (second argument), of a walk with a drift by pair (first argument).
    """
    import numpy as np
    from scipy.stats import norm

    counts = [n for n, _ in looks]
    width = _STEP * math.sqrt(counts[0])
    cells = math.ceil(3 * _REACH * math.sqrt(counts[-1]) / width)
    grid = width * np.arange(-cells, cells + 1)
    # By its sum at the present look, a walk that has not crossed; and walks as they cross above
    inside: Any = norm.pdf(grid, scale=math.sqrt(counts[0])) * width
    limits, above, before, spent = list[float](), list[Any](), counts[0], 0.0
    for n, share in looks:
        if n > before:
            cells = math.ceil(_REACH * math.sqrt(n - before) / width)
            steps = width * np.arange(-cells, cells + 1)
            step = norm.pdf(steps, scale=math.sqrt(n - before)) * width
            inside = np.convolve(inside - above[-1] - above[-1][::-1], step, "same")
        tails = inside[::-1].cumsum()[::-1]
        limit = float(np.interp(-level * (share - spent) / 2, -tails, grid - width / 2))
        limits.append(limit / math.sqrt(n))
        above.append(inside * np.clip((grid - limit) / width + 0.5, 0.0, 1.0))
        before, spent = n, share

    def tail(drift: float, deviate: float) -> float:
        end = inside * np.clip((grid - deviate * math.sqrt(before)) / width + 0.5, 0.0, 1.0)
        total = 0.0
        for n, chance in zip(counts, [*above[:-1], end], strict=True):
            some = chance > 0
            # The likelihood ratio of the drift
            total += float(chance[some] @ np.exp(drift * grid[some] - drift**2 * n / 2))
        return total

    return limits, tail
