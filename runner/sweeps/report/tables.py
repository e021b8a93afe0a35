"""Print a sweep on the terminal."""

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.text import Text

from samewise.runner.errors import number_of
from samewise.runner.records.console import PlainConsole, align, width_of
from samewise.runner.records.sweep_folder import Point, SweepFolder, label
from samewise.runner.sweeps.report.rows import (
    PARETO,
    Row,
    columns,
    count_points,
    front_rows,
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
    rivals,
    spread,
)

_MAX_ROWS = 30
_UNLIMITED = 10_000


def point_values(point: Point) -> dict[str, Any]:
    """Return a point as plain values, for programs."""
    return {
        "point": point.number + 1,
        "number": point.number,
        "setting": point.setting,
        "seed": point.seed,
        "values": dict(point.values),
        "fingerprint": point.fingerprint,
        "folder": point.folder,
    }


def as_plain_values(result: PointResult) -> dict[str, Any]:
    """Return a result as plain values, for programs."""
    return {
        **point_values(result.point),
        "state": result.state.value,
        "reason": result.reason,
        "monitor": result.objective,
        # JSON has no NaN
        "value": None if math.isnan(result.value) else result.value,
        "objectives": {name: result.metrics.get(name) for name in result.objectives},
        "best": dict(result.best),
        "final": dict(result.final),
        "steps": result.steps,
        "seconds": result.seconds,
        "weights_sha256": result.weights_sha256,
        "mlflow_run_id": result.mlflow_run_id,
        "tries": result.tries,
    }


def setting_values(setting: Sequence[PointResult]) -> dict[str, Any]:
    """Return a setting with its means and its seeds' states as plain values, for programs."""
    states = Counter(result.state.value for result in setting)
    return {
        "values": dict(setting[0].point.values),
        "objectives": objective_means(setting),
        **dataclasses.asdict(spread(setting)),
        "states": dict(states),
    }


def print_settings(folder: SweepFolder, results: Sequence[PointResult], *, more: str = "") -> None:
    """Print the settings, the best first, and the Pareto set of several objectives.

    Args:
        folder: The sweep's folder.
        results: Results of its points.
        more: Command that shows a report; "" for no mention.
    """
    console = _console()
    console.print(f"{folder.id}: {count_points(results)}")
    if not results:
        return
    _print_table(
        console,
        setting_rows(results)[:_MAX_ROWS],
        right=(
            results[0].objective,
            *results[0].objectives,
            "std",
            "95 % interval",
            "seeds",
            "time",
        ),
    )
    if note := not_best(results):
        console.print(note)
    ranked = (
        [setting for setting in rank_settings(results) if not lacks_seeds(setting)]
        if len(goals(results)) == 1
        else []
    )
    best = (
        next((result for result in ranked[0] if result.state is State.finished), None)
        if ranked
        else None
    )
    if best:
        chosen = ", which also chose that step" if best.objective == best.point.monitor else ""
        at = "at the last step" if best.objective.startswith("final/") else "at the best step"
        console.print(f"ranked   by {best.objective} ({best.mode}) of each run {at}{chosen}")
        console.print(f"best     {_describe_best(ranked)}\nfolder   {best.point.folder}")
        if more:
            console.print(f"report   {more}")
    if front := front_rows(results):
        console.print(f"\n{PARETO}")
        _print_table(console, front[:_MAX_ROWS], right=tuple(results[0].objectives))
    for result in results:
        if result.state is State.failed:
            log = folder.log(result.point.number)
            console.print(
                f"failed   {result.point.label}: "
                f"{result.reason}{f' ({log})' if log.exists() else ''}",
                style="red",
            )


def _describe_best(ranked: Sequence[Sequence[PointResult]]) -> str:
    """Return the best setting in words, or that it cannot be told from others."""
    name, undecided = label(ranked[0][0].point.values), rivals(ranked)
    if not undecided:
        return name
    if spread(ranked[0]).count < 2:
        ties = sum(spread(setting).mean == spread(ranked[0]).mean for setting in ranked) - 1
        tie_note = f"; the first of {ties + 1} settings with this result" if ties else ""
        return f"{name}   (by one seed, which does not tell settings apart{tie_note})"
    rival, needed = undecided[0]
    return (
        f"not distinguishable: {name} has the best mean, but {number_of(len(undecided), 'other')} "
        f"may be as good, first {label(rival[0].point.values)}"
        + (f"; about {number_of(needed, 'more seed')} would settle that" if needed else "")
    )


def print_points(
    folder: SweepFolder, results: Sequence[PointResult], *, holder: tuple[int, str] | None
) -> None:
    """Print every point with its state.

    Args:
        folder: The sweep's folder.
        results: Results of its points.
        holder: Process id and host of the process that runs the sweep; None if none does.
    """
    console = _console()
    console.print(f"{folder.id}: {count_points(results)}".rstrip(" :"))
    if holder:
        console.print(f"run by process {holder[0]} on {holder[1]}")
    if not results:
        console.print("no points yet")
        return
    rows: list[Row] = [
        {
            "": result.point.number + 1,
            "point": result.point.label,
            "state": result.state.value,
            "step": result.steps or "",
            results[0].objective: number(result.value),
            "reason": result.reason,
        }
        for result in results
    ]
    _print_table(console, rows)
    if any(result.reason == UNSUBMITTED for result in results):
        reason = (
            f", since the launcher refused them: {folder.facts['refused']}"
            if "refused" in folder.facts
            else ""
        )
        console.print(
            f"{UNSUBMITTED}{reason}: `samewise sweep {shlex.quote(str(folder.path))}` submits "
            "these points, or the same command with other launcher settings"
        )
    console.print(
        f"logs     {folder.log(results[0].point.number)} is point 1's; files and `number` in "
        "--json count from 0"
    )


def print_rows(rows: Sequence[Row], *, right: Sequence[str] = ()) -> None:
    """Print rows as a table; the columns in `right` are right-aligned."""
    _print_table(_console(), rows, right=right)


def _print_table(console: PlainConsole, rows: Sequence[Row], *, right: Sequence[str] = ()) -> None:
    """Print rows as a table."""
    cells = {name: [name, *(str(row.get(name, "")) for row in rows)] for name in columns(rows)}
    if rows and sum(map(_width, cells.values())) + 2 * (len(cells) - 1) > console.width:
        # What is the same in all rows goes above the table; the longest cells are wrapped
        shared = [x for x in cells if len(rows) > 1 and x and len({*cells[x][1:]}) == 1]
        if shared:
            console.print("in all: " + "  ".join(f"{x} {rows[0].get(x) or '-'}" for x in shared))
        cells = {name: column for name, column in cells.items() if name not in shared}
        widths = [*map(_width, cells.values())]
        room = console.width - 2 * (len(cells) - 1)
        limits = range(max([*widths, 1]), 0, -1)
        limit = next((x for x in limits if sum(min(x, width) for width in widths) <= room), 1)
        for name, column in cells.items():
            cells[name] = [
                cell if width_of(cell) <= limit else "\n".join(_wrap(console, cell, limit))
                for cell in column
            ]
    lines = align(
        [
            parts
            for row in zip(*cells.values(), strict=True)
            for parts in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")
        ],
        "".join(">" if name in right else "<" for name in cells),
    )
    console.print(Text(next(lines, ""), style="bold"))
    # By rich, each line would take a millisecond
    for line in lines:
        print(line)


def _width(column: Sequence[str]) -> int:
    return max(map(width_of, column))


def _wrap(console: PlainConsole, cell: str, width: int) -> list[str]:
    return [line.plain.rstrip() for line in Text(cell).wrap(console, width, overflow="fold")]


def _console() -> PlainConsole:
    """Return a console on standard output, as wide as the table if that is a pipe or a file."""
    console = PlainConsole(highlight=False, soft_wrap=True)
    return PlainConsole(
        highlight=False, soft_wrap=True, width=console.width if console.is_terminal else _UNLIMITED
    )
