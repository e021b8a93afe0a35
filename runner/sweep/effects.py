"""The effect of each parameter of a sweep on its objective, taken separately. Imports neither torch nor mlflow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.runner.sweep.results import PointResult, Spread, group_by_setting, objective_means, rank_settings, spread

_MOST_LEVELS = 8
"""A parameter with more different values is looked at in ranges."""
_RANGES = 4


@dataclass(frozen=True)
class Level:
    """One value of a parameter, or one range of its values.

    Args:
        name: As an override writes it, or "0.001 to 0.02".
        spread: The metric over the settings that have it, each setting by the mean over its seeds.
    """

    name: str
    spread: Spread


@dataclass(frozen=True)
class Effect:
    """The effect of one parameter.

    Args:
        key: The parameter's.
        share: The share of the variance between settings that lies between this parameter's levels: eta squared, 0 to 1. NaN if all settings gave the same.
        levels: Each with what came of it, in the values' order.
        best: The level with the best mean.
        correlation: Spearman's rank correlation of the value with the metric, -1 to 1; None if the values are not numbers.
    """

    key: str
    share: float
    levels: Sequence[Level]
    best: str
    correlation: float | None


def effects(found: Sequence[PointResult]) -> list[Effect]:
    """The effect of each parameter that varies among the settings with a result, the strongest first.

    Joint effects of parameters are not separated: in a sweep that is not a full grid, a share also includes whatever varies together with the parameter.
    """
    settled = [(setting[0].point.values, spread(setting).mean) for setting in group_by_setting(found)]
    settled = [(values, mean) for values, mean in settled if not math.isnan(mean)]
    mode = found[0].mode if found else "max"
    keys = list(dict.fromkeys(key for values, _ in settled for key in values))
    made = [_effect(key, settled, mode) for key in keys if len({values.get(key) for values, _ in settled}) > 1]
    return sorted(made, key=lambda one: -1.0 if math.isnan(one.share) else one.share, reverse=True)


def left_out(found: Sequence[PointResult]) -> str:
    """A sentence on the settings without a result; empty if there are none."""
    means = [spread(setting).mean for setting in group_by_setting(found)]
    settled = sum(not math.isnan(mean) for mean in means)
    return f"Of {settled} of {len(means)} settings: those without a final result, such as pruned ones, are left out." if settled < len(means) else ""


def as_number(text: str) -> float | None:
    """A value as a number; None if it is not one (such as `adam`)."""
    try:
        return float(text)
    except ValueError:
        return None


def _effect(key: str, settled: Sequence[tuple[Mapping[str, str], float]], mode: str) -> Effect:
    pairs = [(values[key], mean) for values, mean in settled if key in values]
    groups = _group_values(pairs)
    levels = [Level(name, Spread.of(means)) for name, means in groups.items()]
    pick = max if mode == "max" else min
    best = pick(levels, key=lambda level: level.spread.mean).name
    return Effect(key, _share(list(groups.values())), levels, best, _correlation(pairs))


def _group_values(pairs: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    """The metric's values by the parameter's value; if those are many, by equally full ranges."""
    numbers = {text: as_number(text) for text, _ in pairs}
    known = {text: value for text, value in numbers.items() if value is not None}
    order = list(numbers) if len(known) < len(numbers) else sorted(known, key=lambda text: known[text])
    groups = {text: [mean for other, mean in pairs if other == text] for text in order}
    if len(known) < len(numbers) or len(order) <= _MOST_LEVELS:
        return groups
    size = math.ceil(len(order) / _RANGES)
    found = dict[str, list[float]]()
    for start in range(0, len(order), size):
        some = order[start : start + size]
        found[f"{known[some[0]]:.3g} to {known[some[-1]]:.3g}"] = [mean for text in some for mean in groups[text]]
    return found


def _share(groups: Sequence[Sequence[float]]) -> float:
    """Eta squared: the sum of squares between groups divided by the total. NaN if no group has two values, where it would always be 1."""
    if all(len(group) < 2 for group in groups):
        return math.nan
    everything = [value for group in groups for value in group]
    middle = statistics.fmean(everything)
    whole = sum((value - middle) ** 2 for value in everything)
    between = sum(len(group) * (statistics.fmean(group) - middle) ** 2 for group in groups)
    return between / whole if whole > 0 else math.nan


def _correlation(pairs: Sequence[tuple[str, float]]) -> float | None:
    numbers = [(as_number(text), mean) for text, mean in pairs]
    known = [(value, mean) for value, mean in numbers if value is not None]
    if len(known) < len(numbers) or len({value for value, _ in known}) < 2 or len({mean for _, mean in known}) < 2:
        return None
    from scipy.stats import spearmanr

    found: Any = spearmanr([value for value, _ in known], [mean for _, mean in known])
    return float(found[0])


def pareto(found: Sequence[PointResult]) -> list[list[PointResult]]:
    """The settings that are not dominated in the objectives, by their means over seeds, the best in the first objective first.

    As in Optuna's study, only settings with a value from every seed count. Empty if there are not several objectives.
    """
    objectives = found[0].objectives if found else {}
    if len(objectives) < 2:
        return []
    whole = [setting for setting in rank_settings(found) if all(spread(setting, name).count == len(setting) for name in objectives)]
    places = [[-mean if objectives[name] == "max" else mean for name, mean in objective_means(setting).items()] for setting in whole]

    def beaten(place: Sequence[float]) -> bool:
        return any(all(a <= b for a, b in zip(other, place, strict=True)) and other != place for other in places)

    return [setting for setting, place in zip(whole, places, strict=True) if not beaten(place)]
