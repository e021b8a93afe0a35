"""A sweep's settings, each with its seeds: the mean over them, and the best.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.runner.sweeps.results import PointResult, State


@dataclass(frozen=True)
class Spread:
    """A metric over the seeds of a setting.

    Args:
        count: How many runs.
        mean: Their mean.
        deviation: Their standard deviation (n - 1); NaN for one run, or if a value is infinite.
        margin: Half the width of the 95 % confidence interval of the mean, by Student's t; NaN
            likewise.
    """

    count: int
    mean: float
    deviation: float = math.nan
    margin: float = math.nan

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Computed from the values that are numbers."""
        known = [value for value in values if not math.isnan(value)]
        if len(known) < 2:
            return cls(len(known), known[0] if known else math.nan)
        if not all(map(math.isfinite, known)):
            return cls(len(known), sum(known) / len(known))
        deviation = statistics.stdev(known)
        return cls(
            len(known),
            statistics.fmean(known),
            deviation,
            _student(len(known) - 1) * deviation / math.sqrt(len(known)),
        )

    def interval(self, metric: str) -> tuple[float, float]:
        """The mean's 95 % confidence interval; limited to 0 and 1 for a share. NaN for one run."""
        low, high = self.mean - self.margin, self.mean + self.margin
        return (
            (max(low, 0.0), min(high, 1.0))
            if _SHARE.search(metric) and 0.0 <= self.mean <= 1.0
            else (low, high)
        )


_SHARE = re.compile(r"(^|[/_])(accuracy|top\d+|precision|recall|f1|map)$")
"""Metrics from 0 to 1."""


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def group_by_setting(found: Sequence[PointResult]) -> list[list[PointResult]]:
    """The results by setting, over its seeds, in order.

    A setting that was drawn several times is one, and so are seeds that are the same run.
    """
    numbered = dict[int, list[PointResult]]()
    for one in found:
        numbered.setdefault(one.point.setting, []).append(one)
    settings = dict[tuple[Any, ...], list[PointResult]]()
    for setting in map(distinct_runs, numbered.values()):
        settings.setdefault(
            (*setting[0].point.values.items(), *(one.point.folder for one in setting)), setting
        )
    return list(settings.values())


def distinct_runs(found: Iterable[PointResult]) -> list[PointResult]:
    """The results without those of a run that is there already."""
    firsts = dict[str, PointResult]()
    for one in found:
        firsts.setdefault(one.point.folder, one)
    return list(firsts.values())


def spread(of_setting: Sequence[PointResult], objective: str = "") -> Spread:
    """An objective of a setting over its finished seeds.

    If none is named, the one by which settings are ranked.
    """
    return Spread.of(
        one.metrics.get(objective or one.objective, math.nan)
        for one in of_setting
        if one.state is State.finished
    )


def lacks_seeds(of_setting: Sequence[PointResult]) -> bool:
    """Whether a seed has ended without a value: it failed, was pruned or gave NaN, so the setting
    has no mean, and its trial in Optuna no value.
    """
    return any(
        one.state in (State.failed, State.pruned)
        or (
            one.state is State.finished
            and any(
                math.isnan(one.metrics.get(name, math.nan))
                for name in one.objectives or (one.objective,)
            )
        )
        for one in of_setting
    )


def objective_means(of_setting: Sequence[PointResult]) -> dict[str, float]:
    """The mean of each of the sweeper's objectives over a setting's finished seeds."""
    return {name: spread(of_setting, name).mean for name in of_setting[0].objectives}


def goals(found: Sequence[PointResult]) -> list[str]:
    """The objectives by which points are ranked, each with its mode.

    Several, if points have different ones, which cannot be compared.
    """
    return list(dict.fromkeys(f"{one.objective} ({one.mode})" for one in found))


def rank_settings(found: Sequence[PointResult]) -> list[list[PointResult]]:
    """Sort settings by mean, the best first.

    Then those that lack seeds, by the mean over the others, then those without a result.

    If the settings have different objectives, they stay in their order.
    """
    settings = group_by_setting(found)
    if len(goals(found)) > 1:
        return settings
    sign = -1.0 if settings and settings[0][0].mode == "max" else 1.0

    def place(one: Sequence[PointResult]) -> tuple[bool, bool, float]:
        mean = spread(one).mean
        return (math.isnan(mean), lacks_seeds(one), sign * mean)

    return sorted(settings, key=place)
