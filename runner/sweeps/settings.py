"""Group a sweep's results by setting: the mean over seeds, and the best setting.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.runner.paired import LEVEL, estimate, is_share, pairs_needed
from samewise.runner.sweeps.results import PointResult, State


@dataclass(frozen=True)
class Spread:
    """A metric over the seeds of a setting.

    Args:
        count: Number of runs.
        mean: Their mean.
        deviation: Their standard deviation (n - 1); NaN for one run, or if a value is infinite.
        margin: Half the width of the mean's 95 % confidence interval, by Student's t; NaN as above.
    """

    count: int
    mean: float
    deviation: float = math.nan
    margin: float = math.nan

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Compute the spread of the values that are not NaN."""
        numbers = [value for value in values if not math.isnan(value)]
        if len(numbers) < 2:
            return cls(len(numbers), numbers[0] if numbers else math.nan)
        if not all(map(math.isfinite, numbers)):
            # statistics.stdev fails on infinite numbers, and fmean on infinities of both signs
            return cls(len(numbers), sum(numbers) / len(numbers))
        deviation = statistics.stdev(numbers)
        return cls(
            len(numbers),
            statistics.fmean(numbers),
            deviation,
            _student(len(numbers) - 1) * deviation / math.sqrt(len(numbers)),
        )

    def interval(self, metric: str) -> tuple[float, float]:
        """Return the mean's 95 % confidence interval; NaN for one run.

        Args:
            metric: The metric's name. The interval of an accuracy lies within [0, 1].
        """
        low, high = self.mean - self.margin, self.mean + self.margin
        return (
            (max(low, 0.0), min(high, 1.0))
            if is_share(metric) and 0.0 <= self.mean <= 1.0
            else (low, high)
        )


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution."""
    from scipy.stats import t

    return float(t.ppf(0.975, freedom))


def group_by_setting(results: Sequence[PointResult]) -> list[list[PointResult]]:
    """Group results by setting, in order.

    A setting that was drawn several times is a single group, and a run that belongs to several
    seeds occurs once.
    """
    by_number = dict[int, list[PointResult]]()
    for result in results:
        by_number.setdefault(result.point.setting, []).append(result)
    settings = dict[tuple[Any, ...], list[PointResult]]()
    for setting in map(distinct_runs, by_number.values()):
        settings.setdefault(
            (*setting[0].point.values.items(), *(result.point.folder for result in setting)),
            setting,
        )
    return list(settings.values())


def distinct_runs(results: Iterable[PointResult]) -> list[PointResult]:
    """Return the first result of each run."""
    first_results = dict[str, PointResult]()
    for result in results:
        first_results.setdefault(result.point.folder, result)
    return list(first_results.values())


def spread(setting: Sequence[PointResult], objective: str = "") -> Spread:
    """Return the spread of an objective over a setting's finished seeds.

    Args:
        setting: Results of the setting's seeds.
        objective: The metric; "" for that by which settings are ranked.
    """
    return Spread.of(
        result.metrics.get(objective or result.objective, math.nan)
        for result in setting
        if result.state is State.finished
    )


def lacks_seeds(setting: Sequence[PointResult]) -> bool:
    """Whether a seed has ended without a value: it failed, was pruned or gave NaN."""
    # Such a setting has no mean, and its trial in Optuna no value
    return any(
        result.state in (State.failed, State.pruned)
        or (
            result.state is State.finished
            and any(
                math.isnan(result.metrics.get(name, math.nan))
                for name in result.objectives or (result.objective,)
            )
        )
        for result in setting
    )


def objective_means(setting: Sequence[PointResult]) -> dict[str, float]:
    """Return the mean of each of the sweeper's objectives over a setting's finished seeds."""
    return {name: spread(setting, name).mean for name in setting[0].objectives}


def goals(results: Sequence[PointResult]) -> list[str]:
    """Return the objectives by which points are ranked, each with its mode.

    Points with different ones cannot be compared.
    """
    return list(dict.fromkeys(f"{x.objective} ({x.mode})" for x in results))


def rank_settings(results: Sequence[PointResult]) -> list[list[PointResult]]:
    """Sort settings by mean, the best first.

    Settings that lack seeds follow, by the mean over the others; then those without a result.
    Settings with different objectives stay in their order.
    """
    settings = group_by_setting(results)
    if len(goals(results)) > 1:
        return settings
    sign = -1.0 if settings and settings[0][0].mode == "max" else 1.0

    def place(setting: Sequence[PointResult]) -> tuple[bool, bool, float]:
        mean = spread(setting).mean
        return (math.isnan(mean), lacks_seeds(setting), sign * mean)

    return sorted(settings, key=place)


def rivals(
    ranked: Sequence[Sequence[PointResult]],
) -> list[tuple[Sequence[PointResult], int | None]]:
    """Return the settings that may be as good as the first, by pairs of runs with the same seed.

    Args:
        ranked: Settings, the best mean first. As that was chosen among them, the level is shared
            among all pairs of settings.

    Returns:
        Each such setting, with the number of further seeds that would settle it: None if it is more
        than 1000, or unknown from one seed.
    """
    values = [
        {x.point.seed: x.value for x in setting if math.isfinite(x.value)} for setting in ranked
    ]
    level, undecided = LEVEL / max(1, math.comb(len(ranked), 2)), list[Any]()
    for setting, own in zip(ranked[1:], values[1:], strict=True):
        seeds = [seed for seed in values[0] if seed in own]
        pairs = [values[0][x] for x in seeds], [own[x] for x in seeds]
        now = estimate(*pairs, level=level) if seeds else None
        if now is None or now.sign * (1 if setting[0].mode == "max" else -1) <= 0:
            undecided.append((setting, pairs_needed(now, level=level) if now else None))
    return undecided


def pareto(results: Sequence[PointResult]) -> list[list[PointResult]]:
    """Return the settings that no other dominates in the objectives, the best in the first first.

    Empty if there is only one objective.
    """
    objectives = results[0].objectives if results else {}
    if len(objectives) < 2:
        return []
    # As in Optuna's study, only settings with a value from every seed count
    complete = [
        setting
        for setting in rank_settings(results)
        if all(spread(setting, name).count == len(setting) for name in objectives)
    ]
    scores = [
        [
            -mean if objectives[name] == "max" else mean
            for name, mean in objective_means(setting).items()
        ]
        for setting in complete
    ]

    def is_dominated(score: Sequence[float]) -> bool:
        return any(
            # Settings with the same means do not dominate each other
            all(a <= b for a, b in zip(other, score, strict=True)) and other != score
            for other in scores
        )

    return [
        setting for setting, score in zip(complete, scores, strict=True) if not is_dominated(score)
    ]
