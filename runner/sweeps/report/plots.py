"""Plots of a sweep as SVG, reproducible to the bit.

Matplotlib is imported when a plot is drawn, and its global state is not used.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from samewise.runner.errors import truncate
from samewise.runner.records.sweep_folder import label
from samewise.runner.sweeps.report.curves import curve
from samewise.runner.sweeps.report.effects import Effect, as_number, pareto, settled_means
from samewise.runner.sweeps.results import PointResult, State
from samewise.runner.sweeps.settings import (
    Spread,
    group_by_setting,
    objective_means,
    rank_settings,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN = 8
"""Settings with a colour of their own; the rest are grey."""
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
_GREY = "#c8c8c8"


def effects_plot(found: Sequence[PointResult], effects: Sequence[Effect]) -> str:
    """The metric of each setting against each parameter, with each value's mean and 95 % interval.

    The strongest parameter first.
    """
    figure = _figure(4.2 * min(3, len(effects)), 3.4 * math.ceil(len(effects) / 3))
    for number, effect in enumerate(effects):
        axes = figure.add_subplot(math.ceil(len(effects) / 3), min(3, len(effects)), number + 1)
        _effect(axes, found, effect)
    return _svg(figure)


def _effect(axes: Axes, found: Sequence[PointResult], effect: Effect) -> None:
    known = [
        (values[effect.key], mean) for values, mean in settled_means(found) if effect.key in values
    ]
    numbers = [as_number(value) for value, _ in known]
    scale = [value for value in numbers if value is not None]
    numeric = len(scale) == len(known) and len(set(scale)) > 2
    names = [level.name for level in effect.levels]
    if numeric:
        axes.scatter(scale, [mean for _, mean in known], s=18, color=_COLOURS[0], alpha=0.6)
        if min(scale) > 0 and max(scale) / min(scale) >= 20:
            axes.set_xscale("log")
    else:
        axes.scatter(
            [names.index(value) for value, _ in known],
            [mean for _, mean in known],
            s=18,
            color=_COLOURS[0],
            alpha=0.6,
        )
        axes.set_xticks(range(len(names)), [_shorten(name) for name in names])
    if all(as_number(name) is not None for name in names) or not numeric:
        places = [float(name) for name in names] if numeric else list(range(len(names)))
        means = [level.spread.mean for level in effect.levels]
        margins = [_margins(level.spread, found[0].objective) for level in effect.levels]
        axes.errorbar(
            places,
            means,
            yerr=[*zip(*margins, strict=True)],
            fmt="D",
            markersize=5,
            color="black",
            capsize=3,
            linewidth=1,
        )
    share = "" if math.isnan(effect.share) else f": {effect.share:.0%} of the variance"
    axes.set_title(_literal(f"{effect.key.lstrip('+~')}{share}"), fontsize=9)
    axes.set_ylabel(_literal(found[0].objective), fontsize=8)


def _margins(total: Spread, metric: str) -> tuple[float, float]:
    """The distances from the mean to the interval's ends; 0 without an interval."""
    low, high = total.interval(metric)
    return (0.0, 0.0) if math.isnan(low) else (total.mean - low, high - total.mean)


def seeds_plot(found: Sequence[PointResult]) -> str:
    """The metric of every seed of the best settings, with each setting's mean and 95 % interval."""
    settings = [setting for setting in rank_settings(found) if spread(setting).count][: 2 * _SHOWN]
    figure = _figure(7.5, 1.2 + 0.34 * len(settings))
    axes = figure.add_subplot()
    for place, setting in enumerate(settings):
        values = [
            one.value
            for one in setting
            if one.state is State.finished and not math.isnan(one.value)
        ]
        total = spread(setting)
        axes.scatter(values, [place] * len(values), s=20, color=_COLOURS[0], alpha=0.6)
        below, above = _margins(total, setting[0].objective)
        axes.errorbar(
            [total.mean],
            [place],
            xerr=[[below], [above]],
            fmt="D",
            markersize=5,
            color="black",
            capsize=3,
            linewidth=1,
        )
    axes.set_yticks(
        range(len(settings)), [_shorten(label(setting[0].point.values), 60) for setting in settings]
    )
    axes.invert_yaxis()
    axes.set_xlabel(
        f"{_literal(found[0].objective)}: seeds, mean, 95 % interval of the mean", fontsize=8
    )
    return _svg(figure)


def curves_plot(found: Sequence[PointResult], metric: str) -> str:
    """A metric over the steps of every run, coloured for the best settings.

    Empty if no run has logged it.
    """
    figure = _figure(7.5, 4.2)
    axes = figure.add_subplot()
    drawn = False
    settings = rank_settings(found)
    for place, setting in reversed(list(enumerate(settings))):
        colour = _COLOURS[place] if place < _SHOWN else _GREY
        for number, one in enumerate(setting):
            line = [(step, value) for step, value in curve(one, metric) if math.isfinite(value)]
            if not line:
                continue
            drawn = True
            name = (
                _shorten(label(setting[0].point.values), 50)
                if number == 0 and place < _SHOWN
                else None
            )
            axes.plot(
                *zip(*line, strict=True),
                color=colour,
                linewidth=1.2,
                alpha=0.8,
                label=name,
                marker="." if len(line) < 15 else None,
            )
    if not drawn:
        return ""
    handles, names = axes.get_legend_handles_labels()
    if names:
        axes.legend(handles[::-1], names[::-1], fontsize=7, frameon=False)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel(_literal(metric), fontsize=8)
    return _svg(figure)


def objectives_plot(found: Sequence[PointResult]) -> str:
    """The first two objectives of every setting; the Pareto set is marked."""
    objectives = found[0].objectives
    first, second = list(objectives)[:2]
    figure = _figure(5.5, 4.2)
    axes = figure.add_subplot()
    every, front = (
        [(objective_means(one)[first], objective_means(one)[second]) for one in settings]
        for settings in (group_by_setting(found), pareto(found))
    )
    axes.scatter(*zip(*every, strict=True), s=18, color=_GREY)
    if front:
        axes.plot(
            *zip(*sorted(front), strict=True),
            color=_COLOURS[0],
            marker="o",
            markersize=5,
            linewidth=1,
        )
    axes.set_xlabel(_literal(f"{first} ({objectives[first]})"), fontsize=8)
    axes.set_ylabel(_literal(f"{second} ({objectives[second]})"), fontsize=8)
    return _svg(figure)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure) -> str:
    import matplotlib

    for axes in figure.axes:
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    out = io.StringIO()
    with matplotlib.rc_context(
        {"svg.hashsalt": "samewise", "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue().partition("<svg")[1] + out.getvalue().partition("<svg")[2]


def _shorten(text: str, most: int = 24) -> str:
    return _literal(truncate(text, most, ending="…"))


def _literal(text: str) -> str:
    """Escape dollars, which would start a formula.

    The labels of a logarithmic axis are formulas.
    """
    return text.replace("$", r"\$")
