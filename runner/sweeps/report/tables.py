"""Prints a sweep on the terminal."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from samewise.runner.records.console import PlainConsole
from samewise.runner.records.sweep_folder import Point, SweepFolder, label
from samewise.runner.sweeps.report.comparison import pages
from samewise.runner.sweeps.report.effects import Effect
from samewise.runner.sweeps.report.rows import (
    PARETO,
    Row,
    columns,
    count_points,
    effect_facts,
    front_rows,
    level_names,
    not_best,
    number,
    setting_rows,
)
from samewise.runner.sweeps.results import UNSUBMITTED, PointResult, State
from samewise.runner.sweeps.settings import (
    goals,
    lacks_seeds,
    objective_means,
    rank_settings,
    spread,
)

_MOST = 30


def point_values(point: Point) -> dict[str, Any]:
    """A point as plain values, for programs."""
    return {
        "point": point.number + 1,
        "number": point.number,
        "setting": point.setting,
        "seed": point.seed,
        "values": dict(point.values),
        "fingerprint": point.fingerprint,
        "folder": point.folder,
    }


def as_plain_values(one: PointResult) -> dict[str, Any]:
    """A result as plain values, for programs."""
    return {
        **point_values(one.point),
        "state": one.state.value,
        "reason": one.reason,
        "monitor": one.objective,
        "value": None if math.isnan(one.value) else one.value,
        "objectives": {name: one.metrics.get(name) for name in one.objectives},
        "best": dict(one.best),
        "final": dict(one.final),
        "steps": one.steps,
        "seconds": one.seconds,
        "weights_sha256": one.weights_sha256,
        "mlflow_run_id": one.mlflow_run_id,
        "tries": one.tries,
    }


def setting_values(setting: Sequence[PointResult]) -> dict[str, Any]:
    """A setting with its means over seeds and its seeds' states as plain values, for programs."""
    states = Counter(one.state.value for one in setting)
    return {
        "values": dict(setting[0].point.values),
        "objectives": objective_means(setting),
        **dataclasses.asdict(spread(setting)),
        "states": dict(states),
    }


def print_settings(folder: SweepFolder, found: Sequence[PointResult], *, more: str = "") -> None:
    """Print the settings, the best first, with the objective's mean over seeds.

    The Pareto set of several objectives; and the command that shows `more`.
    """
    console = _console()
    console.print(f"{folder.id}: {count_points(found)}")
    if not found:
        return
    _print_table(
        console,
        setting_rows(found)[:_MOST],
        right=(found[0].objective, *found[0].objectives, "std", "95 % interval", "seeds", "time"),
    )
    if note := not_best(found):
        console.print(note)
    ranked = (
        [setting for setting in rank_settings(found) if not lacks_seeds(setting)]
        if len(goals(found)) == 1
        else []
    )
    best = next((one for one in ranked[0] if one.state is State.finished), None) if ranked else None
    if best:
        ties = sum(spread(setting).mean == spread(ranked[0]).mean for setting in ranked) - 1
        also = f"   (the first of {ties + 1} settings with this result)" if ties else ""
        console.print(f"best     {label(best.point.values)}{also}\nfolder   {best.point.folder}")
        if more:
            console.print(f"report   {more}")
    if front := front_rows(found):
        console.print(f"\n{PARETO}")
        _print_table(console, front[:_MOST], right=tuple(found[0].objectives))
    for one in found:
        if one.state is State.failed:
            log = folder.log(one.point.number)
            console.print(
                f"failed   {one.point.label}: {one.reason}{f' ({log})' if log.exists() else ''}",
                style="red",
            )


def print_pages(folder: SweepFolder, found: Sequence[PointResult]) -> None:
    """Print addresses of the MLflow UI that compare the runs; nothing if they are not in MLflow."""
    known = pages(folder, found)
    if known is None:
        return
    console = _console()
    opens = f" (after `{known.opens}`)" if known.opens else ""
    console.print(f"compare  {known.compare}{opens}\ntable    {known.table}")


def print_effects(effects: Sequence[Effect], note: str = "") -> None:
    """Print the effect of each parameter, the strongest first, and a note below."""
    console, rows = _console(), list[Row]()
    for one in effects:
        named = zip(level_names(one), one.levels, strict=True)
        levels = (
            f"{name}: {number(level.spread.mean)}{' (best)' if level.name == one.best else ''}"
            for name, level in named
        )
        rows.append({**effect_facts(one), "mean of each value": "  ".join(levels)})
    if rows:
        console.print()
        _print_table(console, rows, right=("share",))
    if note:
        console.print(note)


def print_points(
    folder: SweepFolder, found: Sequence[PointResult], *, held: tuple[int, str] | None
) -> None:
    """Print every point with its state."""
    console = _console()
    console.print(f"{folder.id}: {count_points(found)}".rstrip(" :"))
    if held:
        console.print(f"run by process {held[0]} on {held[1]}")
    if not found:
        console.print("no points yet")
        return
    rows: list[Row] = [
        {
            "": one.point.number + 1,
            "point": one.point.label,
            "state": one.state.value,
            "step": one.steps or "",
            found[0].objective: number(one.value),
            "reason": one.reason,
        }
        for one in found
    ]
    _print_table(console, rows)
    if any(one.reason == UNSUBMITTED for one in found):
        why = (
            f", since the launcher refused them: {folder.facts['refused']}"
            if "refused" in folder.facts
            else ""
        )
        console.print(
            f"{UNSUBMITTED}: `samewise sweep {shlex.quote(str(folder.path))}` submits "
            f"these points, or the same command with other launcher settings{why}"
        )
    console.print(
        f"logs     {folder.log(found[0].point.number)} is point 1's; files and `number` in "
        "--json count from 0"
    )


def print_rows(rows: Sequence[Row], *, right: Sequence[str] = ()) -> None:
    """Print rows as a table; the columns in `right` are right-aligned."""
    _print_table(_console(), rows, right=right)


def _print_table(console: PlainConsole, rows: Sequence[Row], *, right: Sequence[str] = ()) -> None:
    """Print rows as a table.

    On a narrow terminal, what is the same in all rows goes above it; rich wraps the rest.
    """
    table = _table(rows, columns(rows), right=right)
    if (
        console.measure(table, options=console.options.update(max_width=_ANY)).maximum
        > console.width
    ):
        same = [
            name
            for name in columns(rows)
            if len(rows) > 1 and name and len({str(row.get(name, "")) for row in rows}) == 1
        ]
        if same:
            console.print(
                "in all: " + "  ".join(f"{name} {rows[0].get(name) or '-'}" for name in same)
            )
        table = _table(rows, [name for name in columns(rows) if name not in same], right=right)
    console.print(table)


_ANY = 10_000


def _table(rows: Sequence[Row], names: Sequence[str], *, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(Text(name), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(row.get(name, ""))) for name in names))
    return table


def _console() -> PlainConsole:
    """Standard output; a pipe or a file is as wide as the table."""
    console = PlainConsole(highlight=False, soft_wrap=True)
    return PlainConsole(
        highlight=False, soft_wrap=True, width=console.width if console.is_terminal else _ANY
    )
