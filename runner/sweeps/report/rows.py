"""Turn a sweep into rows, mappings from columns to cells, for terminal and CSV.

Imports neither torch nor mlflow.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from samewise.runner.records.sweep_folder import Point, short
from samewise.runner.secrets import plain_cell, redact
from samewise.runner.sweeps.progress import clock
from samewise.runner.sweeps.results import PointResult
from samewise.runner.sweeps.settings import (
    goals,
    lacks_seeds,
    objective_means,
    pareto,
    rank_settings,
    spread,
)

Row = Mapping[str, Any]

PARETO = "Pareto set: no other setting is at least as good in every objective and better in one"


def setting_rows(results: Sequence[PointResult], *, exact: bool = False) -> list[Row]:
    """Return the settings, the best first, with the mean over seeds and its uncertainty.

    Args:
        results: Results of the sweep's points.
        exact: Whether to show all digits and columns.
    """
    show = exactly if exact else number
    has_seeds = exact or any(result.point.seed is not None for result in results)
    rows = list[Row]()
    for setting in rank_settings(results):
        total = spread(setting)
        row: dict[str, Any] = _values(setting[0].point, exact=exact)
        row[setting[0].objective] = show(total.mean if total.count else setting[0].value)
        if has_seeds:
            low, high = map(show, total.interval(setting[0].objective))
            # With one degree of freedom, Student's t is 12.7, and the interval says little
            remark = " (2 seeds: too few)" if total.count == 2 else ""
            interval = (
                {"95 % from": low, "95 % to": high}
                if exact
                else {"95 % interval": f"{low} to {high}{remark}" if low else ""}
            )
            row |= {"std": show(total.deviation), **interval, "seeds": total.count}
        row |= {
            name: show(mean) for name, mean in objective_means(setting).items() if name not in row
        }
        row["state"] = (
            setting[0].state.value if len(setting) == 1 and not exact else count_points(setting)
        )
        seconds = sum(result.seconds for result in setting)
        rows.append(
            {**row, **({"training s": f"{seconds:.1f}"} if exact else {"time": clock(seconds)})}
        )
    return rows


def point_rows(results: Sequence[PointResult]) -> list[Row]:
    """Return every point with all digits, and all metrics: best/... and final/..."""
    return [
        {
            "point": result.point.number + 1,
            **_values(result.point, exact=True),
            **({"seed": result.point.seed} if result.point.seed is not None else {}),
            "state": result.state.value,
            result.objective: exactly(result.value),
            "steps": result.steps,
            "training s": f"{result.seconds:.1f}",
            "tries": result.tries,
            "weights sha256": result.weights_sha256,
            "folder": result.point.folder,
            "reason": result.reason,
            **{f"best/{name}": value for name, value in result.best.items()},
            **{f"final/{name}": value for name, value in result.final.items()},
        }
        for result in results
    ]


def evaluation_rows(points: Sequence[Mapping[str, Any]], *, exact: bool = False) -> list[Row]:
    """Return each point of an evaluation, `tables.point_values` with `metrics`, as a row."""
    return [
        {
            "point": point["point"],
            **{key: value if exact else short(value) for key, value in point["values"].items()},
            **({} if point["seed"] is None else {"seed": point["seed"]}),
            **{key: point.get(key, "") for key in ("state", "step")},
            **{key: (exactly if exact else number)(x) for key, x in point["metrics"].items()},
        }
        for point in points
    ]


def not_best(results: Sequence[PointResult]) -> str:
    """Return a sentence on settings that cannot be the best; "" if there are none."""
    if len(objectives := goals(results)) > 1:
        return (
            f"The settings are not ranked, as their objectives differ: {' and '.join(objectives)}."
        )
    count = sum(
        lacks_seeds(setting) and spread(setting).count > 0 for setting in rank_settings(results)
    )
    subject = "1 setting has" if count == 1 else f"{count} settings have"
    return (
        f"{subject} a seed that failed, was pruned or gave NaN, and cannot be the best: the mean "
        "is over the other seeds only."
        if count
        else ""
    )


def front_rows(results: Sequence[PointResult]) -> list[Row]:
    """Return the settings of the Pareto set, with their means in the objectives."""
    return [
        {
            **_values(setting[0].point, exact=False),
            **{name: number(mean) for name, mean in objective_means(setting).items()},
        }
        for setting in pareto(results)
    ]


def columns(rows: Iterable[Row]) -> list[str]:
    """Return the columns of all rows, in order."""
    return list(dict.fromkeys(name for row in rows for name in row))


def count_points(results: Iterable[PointResult]) -> str:
    """Return the number of points in each state: `3 finished, 1 failed`."""
    return ", ".join(
        f"{count} {state}"
        for state, count in Counter(result.state.value for result in results).items()
    )


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, without secrets and without cells that a spreadsheet runs as formulas."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns(rows), lineterminator="\n")
    writer.writerow({name: plain_cell(name) for name in columns(rows)})
    writer.writerows({name: plain_cell(value) for name, value in row.items()} for row in rows)
    return redact(out.getvalue())


def number(value: float) -> str:
    """Format with four digits; "" for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"


def exactly(value: float) -> str:
    """Format with all digits; "" for NaN."""
    # repr writes the fewest digits that read back as the same number
    return "" if math.isnan(value) else repr(value)


def _values(point: Point, *, exact: bool) -> dict[str, str]:
    return {
        key.lstrip("+~"): value if exact else short(value) for key, value in point.values.items()
    }
