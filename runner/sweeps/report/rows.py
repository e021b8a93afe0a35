"""A sweep as rows, mappings from columns to cells, for terminal and CSV.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.runner.errors import number_of
from samewise.runner.records.sweep_folder import Point, SweepFolder, short
from samewise.runner.secrets import plain_cell, redact
from samewise.runner.sweeps.progress import clock
from samewise.runner.sweeps.report.effects import Effect, pareto
from samewise.runner.sweeps.results import PointResult, State
from samewise.runner.sweeps.settings import (
    goals,
    lacks_seeds,
    objective_means,
    rank_settings,
    spread,
)

Row = Mapping[str, Any]

PARETO = "Pareto set: no other setting is at least as good in every objective and better in one"


def setting_rows(found: Sequence[PointResult], *, exact: bool = False) -> list[Row]:
    """The settings, the best first: the objective's mean over seeds, its deviation and confidence
    interval. `exact`: all digits and columns.
    """
    show = exactly if exact else number
    several = exact or any(one.point.seed is not None for one in found)
    rows = list[Row]()
    for setting in rank_settings(found):
        total = spread(setting)
        row: dict[str, Any] = _values(setting[0].point, exact=exact)
        row[setting[0].objective] = show(total.mean if total.count else setting[0].value)
        if several:
            low, high = map(show, total.interval(setting[0].objective))
            few = " (2 seeds: too few)" if total.count == 2 else ""
            interval = (
                {"95 % from": low, "95 % to": high}
                if exact
                else {"95 % interval": f"{low} to {high}{few}" if low else ""}
            )
            row |= {"std": show(total.deviation), **interval, "seeds": total.count}
        row |= {
            name: show(mean) for name, mean in objective_means(setting).items() if name not in row
        }
        row["state"] = (
            setting[0].state.value if len(setting) == 1 and not exact else count_points(setting)
        )
        seconds = sum(one.seconds for one in setting)
        rows.append(
            {**row, **({"training s": f"{seconds:.1f}"} if exact else {"time": clock(seconds)})}
        )
    return rows


def point_rows(found: Sequence[PointResult]) -> list[Row]:
    """Every point with all digits, and all metrics at its best step (best/...) and at its end
    (final/...).
    """
    return [
        {
            "point": one.point.number + 1,
            **_values(one.point, exact=True),
            **({"seed": one.point.seed} if one.point.seed is not None else {}),
            "state": one.state.value,
            one.objective: exactly(one.value),
            "steps": one.steps,
            "training s": f"{one.seconds:.1f}",
            "tries": one.tries,
            "weights sha256": one.weights_sha256,
            "folder": one.point.folder,
            "reason": one.reason,
            **{f"best/{name}": value for name, value in one.best.items()},
            **{f"final/{name}": value for name, value in one.final.items()},
        }
        for one in found
    ]


def level_names(effect: Effect) -> list[str]:
    """The names of an effect's levels, shortened if they can still be told apart."""
    shortened = [short(level.name) for level in effect.levels]
    return (
        shortened
        if len(set(shortened)) == len(shortened)
        else [level.name for level in effect.levels]
    )


def effect_facts(effect: Effect) -> dict[str, str]:
    """A parameter and the size of its effect."""
    share = "" if math.isnan(effect.share) else f"{effect.share:.0%}"
    return {
        "parameter": effect.key.lstrip("+~"),
        "share": share,
    }


def not_best(found: Sequence[PointResult]) -> str:
    """A sentence on the settings that cannot be the best, since they lack seeds, or have different
    objectives; empty if there are none.
    """
    if len(different := goals(found)) > 1:
        return (
            "The settings are not ranked, and none is the best: their objectives differ, "
            f"{' and '.join(different)}."
        )
    count = sum(
        lacks_seeds(setting) and spread(setting).count > 0 for setting in rank_settings(found)
    )
    which = "1 setting has" if count == 1 else f"{count} settings have"
    return (
        f"{which} a seed that failed, was pruned or gave NaN, and cannot be the best: the "
        "mean is over the other seeds alone."
        if count
        else ""
    )


def front_rows(found: Sequence[PointResult]) -> list[Row]:
    """The settings of the Pareto set, with their means in the objectives."""
    return [
        {
            **_values(one[0].point, exact=False),
            **{name: number(mean) for name, mean in objective_means(one).items()},
        }
        for one in pareto(found)
    ]


def columns(rows: Iterable[Row]) -> list[str]:
    """The columns of all rows, in order."""
    return list(dict.fromkeys(name for row in rows for name in row))


def count_points(found: Iterable[PointResult]) -> str:
    """The number of points in each state: `3 finished, 1 failed`."""
    return ", ".join(
        f"{count} {state}" for state, count in Counter(one.state.value for one in found).items()
    )


@dataclass(frozen=True)
class Cost:
    """The time and work that a sweep has taken.

    Args:
        training_s: Seconds of training, summed over its runs that did not fail; of an unfinished
            run, the time that its jobs took.
        span_s: From the first job's beginning to the last one's end.
        steps: Optimizer steps of all runs.
        tries: Jobs started.
        lost_s: Seconds of jobs whose run failed.
    """

    training_s: float
    span_s: float
    steps: int
    tries: int
    lost_s: float


def cost(folder: SweepFolder, found: Sequence[PointResult]) -> Cost:
    """The cost of all points so far."""
    words = [(one, folder.word(one.point.number)) for one in found]
    began = [float(word.get("first_began", word["began"])) for _, word in words if "began" in word]
    ended = [float(word["ended"]) for _, word in words if "ended" in word]
    lost = sum(one.seconds for one in found if one.state is State.failed)
    once = {one.point.folder: one for one in found}.values()
    span = max(0.0, max(ended) - min(began)) if began and ended else 0.0
    trained = sum(one.seconds for one in once if one.state is not State.failed)
    return Cost(
        trained, span, sum(one.steps for one in once), sum(one.tries for one in found), lost
    )


def cost_in_words(spent: Cost) -> str:
    """The sweep's cost."""
    lost = f", {clock(spent.lost_s)} on runs that failed" if spent.lost_s >= 1 else ""
    return (
        f"{clock(spent.training_s)} of training, {number_of(spent.steps, 'step')}, "
        f"{number_of(spent.tries, 'job')} started, {clock(spent.span_s)} in all{lost}"
    )


def as_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV without passwords, tokens and cells that a spreadsheet would take for formulas."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns(rows), lineterminator="\n")
    writer.writerow({name: plain_cell(name) for name in columns(rows)})
    writer.writerows({name: plain_cell(value) for name, value in row.items()} for row in rows)
    return redact(out.getvalue())


def number(value: float) -> str:
    """Four digits; empty for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"


def exactly(value: float) -> str:
    """All digits; empty for NaN."""
    return "" if math.isnan(value) else repr(value)


def _values(point: Point, *, exact: bool) -> dict[str, str]:
    return {
        key.lstrip("+~"): value if exact else short(value) for key, value in point.values.items()
    }
