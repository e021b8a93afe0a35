"""Measure the effect of each parameter of a sweep on its objective, taken separately.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from samewise.runner.sweeps.results import PointResult
from samewise.runner.sweeps.settings import (
    Spread,
    goals,
    group_by_setting,
    lacks_seeds,
    objective_means,
    rank_settings,
    spread,
)

_MAX_LEVELS = 8
"""Maximum number of values that are shown one by one; more are grouped into ranges."""
_RANGES = 4


@dataclass(frozen=True)
class Level:
    """One value of a parameter, or one range of its values.

    Args:
        name: The value as an override writes it, or "0.001 to 0.02"; unique within the parameter.
        spread: Spread of the metric over the settings with this value, each with its mean over
            seeds.
    """

    name: str
    spread: Spread


@dataclass(frozen=True)
class Effect:
    """Effect of one parameter.

    Args:
        key: The parameter's key.
        share: Share of the variance between settings that lies between this parameter's levels: eta
            squared, 0 to 1. NaN if all settings gave the same.
        levels: The parameter's levels, in the values' order.
        best: Name of the level with the best mean.
    """

    key: str
    share: float
    levels: Sequence[Level]
    best: str


def effects(results: Sequence[PointResult]) -> list[Effect]:
    """Return the effect of each parameter that varies, the strongest first.

    Only settings with a result count. Empty if they have different objectives. Joint effects of
    parameters are not separated: unless the sweep is a full grid, a share also includes whatever
    varies together with the parameter.
    """
    if len(goals(results)) > 1:
        return []
    settled = settled_means(results)
    mode = results[0].mode if results else "max"
    keys = list(dict.fromkeys(key for values, _ in settled for key in values))
    all_effects = [
        _effect(key, settled, mode)
        for key in keys
        if len({values.get(key) for values, _ in settled}) > 1
    ]
    return sorted(
        all_effects,
        key=lambda effect: -1.0 if math.isnan(effect.share) else effect.share,
        reverse=True,
    )


def settled_means(results: Sequence[PointResult]) -> list[tuple[Mapping[str, str], float]]:
    """Return (values, mean over seeds) of each setting that has a result and lacks no seed."""
    settled = [
        (setting[0].point.values, spread(setting).mean)
        for setting in _distinct(results)
        if not lacks_seeds(setting)
    ]
    return [(values, mean) for values, mean in settled if not math.isnan(mean)]


def left_out(results: Sequence[PointResult]) -> str:
    """Return a sentence on the settings without a result; "" if there are none."""
    settled, count = len(settled_means(results)), len(_distinct(results))
    sentence = (
        f"The effects are those of {settled} of {count} settings. Settings without a final "
        "result, such as pruned ones, or with a failed seed are left out."
    )
    return sentence if settled < count else ""


def _distinct(results: Sequence[PointResult]) -> list[list[PointResult]]:
    """Group results by setting; settings with the same runs are a single group."""
    settings = dict[tuple[str, ...], list[PointResult]]()
    for setting in group_by_setting(results):
        settings.setdefault(tuple(result.point.folder for result in setting), setting)
    return list(settings.values())


def as_number(text: str) -> float | None:
    """Return a value as a finite number; None if it is not one, such as `adam`."""
    try:
        # float() also reads "nan" and "inf"
        return value if math.isfinite(value := float(text)) else None
    except ValueError:
        return None


def _effect(key: str, settled: Sequence[tuple[Mapping[str, str], float]], mode: str) -> Effect:
    """Return the effect of one parameter."""
    pairs = [(values[key], mean) for values, mean in settled if key in values]
    groups = _group_values(pairs)
    levels = [Level(name, Spread.of(means)) for name, means in groups]
    pick = max if mode == "max" else min
    best = pick(levels, key=lambda level: level.spread.mean).name
    return Effect(key, _share([means for _, means in groups]), levels, best)


def _group_values(pairs: Sequence[tuple[str, float]]) -> list[tuple[str, list[float]]]:
    """Group the metric's values by the parameter's; many numbers into equally full ranges."""
    groups = dict[str, list[float]]()
    for text, mean in pairs:
        groups.setdefault(text, []).append(mean)
    numbers = {text: value for text in groups if (value := as_number(text)) is not None}
    if len(numbers) < len(groups):
        return list(groups.items())
    order = sorted(numbers, key=lambda text: numbers[text])
    if len(order) <= _MAX_LEVELS:
        return [(text, groups[text]) for text in order]
    values = sorted(set(numbers.values()))
    size = math.ceil(len(values) / _RANGES)
    ranges = [values[start : start + size] for start in range(0, len(values), size)]
    write = _as_distinct([end for interval in ranges for end in (interval[0], interval[-1])])
    names = [
        " to ".join(dict.fromkeys((write(interval[0]), write(interval[-1])))) for interval in ranges
    ]
    return [
        (name, [mean for text in order if numbers[text] in interval for mean in groups[text]])
        for name, interval in zip(names, ranges, strict=True)
    ]


def _as_distinct(numbers: Sequence[float]) -> Callable[[float], str]:
    """Return a function that writes numbers with enough digits to tell them apart."""

    def write(value: float, digits: int) -> str:
        # Below 1e15 a float64 holds every whole number
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.{digits}g}"

    digits = next(
        digits
        # 17 digits tell all float64 numbers apart
        for digits in range(3, 18)
        if len({float(write(value, digits)) for value in numbers}) == len(set(numbers))
    )
    return lambda value: write(value, digits)


def _share(groups: Sequence[Sequence[float]]) -> float:
    """Return eta squared: the sum of squares between groups divided by the total.

    NaN if a value is infinite, or no group has two values, as it would always be 1.
    """
    values = [value for group in groups for value in group]
    if all(len(group) < 2 for group in groups) or not all(map(math.isfinite, values)):
        return math.nan
    mean = statistics.fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    between = sum(len(group) * (statistics.fmean(group) - mean) ** 2 for group in groups)
    return between / total if total > 0 else math.nan


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
