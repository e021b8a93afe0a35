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
from samewise.runner.sweep.comparison import pages
from samewise.runner.sweep.effects import Effect
from samewise.runner.sweep.results import UNSUBMITTED, PointResult, State, goals, lacks_seeds, objective_means, rank_settings, spread
from samewise.runner.sweep.rows import PARETO, Row, columns, count_points, effect_facts, front_rows, level_names, not_best, number, setting_rows

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
    return {"values": dict(setting[0].point.values), "objectives": objective_means(setting), **dataclasses.asdict(spread(setting)), "states": dict(states)}


def print_settings(folder: SweepFolder, found: Sequence[PointResult], *, more: str = "") -> None:
    """Print the settings, the best first, with the objective's mean over seeds; the Pareto set of several objectives; and the command that shows `more`."""
    console = _console()
    console.print(f"{folder.id}: {count_points(found)}")
    if not found:
        return
    console.print(_table(setting_rows(found)[:_MOST], right=(found[0].objective, *found[0].objectives, "std", "95 % interval", "seeds", "time")))
    if note := not_best(found):
        console.print(note)
    ranked = [setting for setting in rank_settings(found) if not lacks_seeds(setting)] if len(goals(found)) == 1 else []
    best = next((one for one in ranked[0] if one.state is State.finished), None) if ranked else None
    if best:
        ties = sum(spread(setting).mean == spread(ranked[0]).mean for setting in ranked) - 1
        also = f"   (the first of {ties + 1} settings with this result)" if ties else ""
        console.print(f"best     {label(best.point.values)}{also}\nfolder   {best.point.folder}")
        if more:
            console.print(f"report   {more}")
    if front := front_rows(found):
        console.print(f"\n{PARETO}")
        console.print(_table(front[:_MOST], right=tuple(found[0].objectives)))
    for one in found:
        if one.state is State.failed:
            log = folder.log(one.point.number)
            console.print(f"failed   {one.point.label}: {one.reason}{f' ({log})' if log.exists() else ''}", style="red")


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
        levels = (f"{name}: {number(level.spread.mean)}{' (best)' if level.name == one.best else ''}" for name, level in named)
        rows.append({**effect_facts(one), "mean of each value": "  ".join(levels)})
    if rows:
        console.print()
        console.print(_table(rows, right=("share", "rank correlation")))
    if note:
        console.print(note)


def print_points(folder: SweepFolder, found: Sequence[PointResult], *, held: tuple[int, str] | None) -> None:
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
    console.print(_table(rows))
    if any(one.reason == UNSUBMITTED for one in found):
        why = f", since the launcher refused them: {folder.facts['refused']}" if "refused" in folder.facts else ""
        console.print(
            f"{UNSUBMITTED}: `samewise sweep {shlex.quote(str(folder.path))}` submits these points, or the same command with other launcher settings{why}"
        )
    console.print(f"logs     {folder.log(found[0].point.number)} is point 1's; files and `number` in --json count from 0")


def print_rows(rows: Sequence[Row], *, right: Sequence[str] = ()) -> None:
    """Print rows as a table; the columns in `right` are right-aligned."""
    _console().print(_table(rows, right=right))


_SHORT = 12
"""Characters of a number, a run or a state: on a narrow terminal, the columns of longer words are wrapped first. Nothing is cut."""


_NARROWEST = 72


def _table(rows: Sequence[Row], *, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = columns(rows)
    for name in names:
        is_short = all(len(cell := str(row.get(name, ""))) <= _SHORT and " " not in cell for row in rows)
        table.add_column(Text(name), justify="right" if name in right else "left", overflow="fold", no_wrap=is_short)
    for row in rows:
        table.add_row(*(Text(str(row.get(name, ""))) for name in names))
    return table


def _console() -> PlainConsole:
    """Standard output; for a pipe or a file, as wide as the table, and never so narrow that numbers would have to be cut."""
    console = PlainConsole(highlight=False, soft_wrap=True)
    return PlainConsole(highlight=False, soft_wrap=True, width=max(_NARROWEST, console.width) if console.is_terminal else 400)
