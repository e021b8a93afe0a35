"""The effect of each parameter of a sweep on its objective, taken separately.

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

_MOST_LEVELS = 8
"""A parameter with more different values is looked at in ranges."""
_RANGES = 4


@dataclass(frozen=True)
class Level:
    """One value of a parameter, or one range of its values.

    Args:
        name: As an override writes it, or "0.001 to 0.02"; no other level of the parameter has it.
        spread: The metric over the settings that have it, each setting by the mean over its seeds.
    """

    name: str
    spread: Spread


@dataclass(frozen=True)
class Effect:
    """The effect of one parameter.

    Args:
        key: The parameter's.
        share: The share of the variance between settings that lies between this parameter's levels:
            eta squared, 0 to 1. NaN if all settings gave the same.
        levels: Each with what came of it, in the values' order.
        best: The level with the best mean.
    """

    key: str
    share: float
    levels: Sequence[Level]
    best: str


def effects(found: Sequence[PointResult]) -> list[Effect]:
    """The effect of each parameter that varies among the settings with a result, the strongest
    first.

    Empty if the settings have different objectives. Joint effects of parameters are not separated:
    in a sweep that is not a full grid, a share also includes whatever varies together with the
    parameter.
    """
    if len(goals(found)) > 1:
        return []
    settled = settled_means(found)
    mode = found[0].mode if found else "max"
    keys = list(dict.fromkeys(key for values, _ in settled for key in values))
    made = [
        _effect(key, settled, mode)
        for key in keys
        if len({values.get(key) for values, _ in settled}) > 1
    ]
    return sorted(made, key=lambda one: -1.0 if math.isnan(one.share) else one.share, reverse=True)


def settled_means(found: Sequence[PointResult]) -> list[tuple[Mapping[str, str], float]]:
    """(values, mean of the metric over seeds) of each setting that has a result and lacks no seed."""
    settled = [
        (setting[0].point.values, spread(setting).mean)
        for setting in _distinct(found)
        if not lacks_seeds(setting)
    ]
    return [(values, mean) for values, mean in settled if not math.isnan(mean)]


def left_out(found: Sequence[PointResult]) -> str:
    """A sentence on the settings without a result; empty if there are none."""
    settled, count = len(settled_means(found)), len(_distinct(found))
    words = (
        f"The effects are those of {settled} of {count} settings: those without a final "
        "result, such as pruned ones, or with a failed seed are left out."
    )
    return words if settled < count else ""


def _distinct(found: Sequence[PointResult]) -> list[list[PointResult]]:
    """The settings by their runs.

    Those that differ only in what does not change the result are one.
    """
    settings = dict[tuple[str, ...], list[PointResult]]()
    for setting in group_by_setting(found):
        settings.setdefault(tuple(one.point.folder for one in setting), setting)
    return list(settings.values())


def as_number(text: str) -> float | None:
    """A value as a finite number; None if it is not one (such as `adam`)."""
    try:
        return value if math.isfinite(value := float(text)) else None
    except ValueError:
        return None


def _effect(key: str, settled: Sequence[tuple[Mapping[str, str], float]], mode: str) -> Effect:
    pairs = [(values[key], mean) for values, mean in settled if key in values]
    groups = _group_values(pairs)
    levels = [Level(name, Spread.of(means)) for name, means in groups]
    pick = max if mode == "max" else min
    best = pick(levels, key=lambda level: level.spread.mean).name
    return Effect(key, _share([means for _, means in groups]), levels, best)


def _group_values(pairs: Sequence[tuple[str, float]]) -> list[tuple[str, list[float]]]:
    """(name, the metric's values) of each of the parameter's values.

    If those are many numbers, of equally full ranges.
    """
    groups = dict[str, list[float]]()
    for text, mean in pairs:
        groups.setdefault(text, []).append(mean)
    known = {text: value for text in groups if (value := as_number(text)) is not None}
    if len(known) < len(groups):
        return list(groups.items())
    order = sorted(known, key=lambda text: known[text])
    if len(order) <= _MOST_LEVELS:
        return [(text, groups[text]) for text in order]
    values = sorted(set(known.values()))
    size = math.ceil(len(values) / _RANGES)
    ranges = [values[start : start + size] for start in range(0, len(values), size)]
    write = _as_distinct([end for some in ranges for end in (some[0], some[-1])])
    names = [" to ".join(dict.fromkeys((write(some[0]), write(some[-1])))) for some in ranges]
    return [
        (name, [mean for text in order if known[text] in some for mean in groups[text]])
        for name, some in zip(names, ranges, strict=True)
    ]


def _as_distinct(numbers: Sequence[float]) -> Callable[[float], str]:
    """Writes numbers so that these can be told apart, with three digits or as many more as it
    takes; whole numbers with all of theirs.
    """

    def write(value: float, digits: int) -> str:
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.{digits}g}"

    digits = next(
        digits
        for digits in range(3, 18)
        if len({float(write(value, digits)) for value in numbers}) == len(set(numbers))
    )
    return lambda value: write(value, digits)


def _share(groups: Sequence[Sequence[float]]) -> float:
    """Eta squared: the sum of squares between groups divided by the total.

    NaN if a value is infinite, or no group has two, where it would always be 1.
    """
    everything = [value for group in groups for value in group]
    if all(len(group) < 2 for group in groups) or not all(map(math.isfinite, everything)):
        return math.nan
    middle = statistics.fmean(everything)
    whole = sum((value - middle) ** 2 for value in everything)
    between = sum(len(group) * (statistics.fmean(group) - middle) ** 2 for group in groups)
    return between / whole if whole > 0 else math.nan


def pareto(found: Sequence[PointResult]) -> list[list[PointResult]]:
    """The settings that are not dominated in the objectives, by their means over seeds, the best in
    the first objective first.

    As in Optuna's study, only settings with a value from every seed count. Empty if there are not
    several objectives.
    """
    objectives = found[0].objectives if found else {}
    if len(objectives) < 2:
        return []
    whole = [
        setting
        for setting in rank_settings(found)
        if all(spread(setting, name).count == len(setting) for name in objectives)
    ]
    places = [
        [
            -mean if objectives[name] == "max" else mean
            for name, mean in objective_means(setting).items()
        ]
        for setting in whole
    ]

    def beaten(place: Sequence[float]) -> bool:
        return any(
            all(a <= b for a, b in zip(other, place, strict=True)) and other != place
            for other in places
        )

    return [setting for setting, place in zip(whole, places, strict=True) if not beaten(place)]
