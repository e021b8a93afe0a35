"""A sweep on the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from samewise.runner.records.sweep_folder import SweepFolder, label, short
from samewise.runner.sweep.comparison import pages
from samewise.runner.sweep.curves import Cost
from samewise.runner.sweep.effects import Effect
from samewise.runner.sweep.progress import clock
from samewise.runner.sweep.results import Outcome, State, ranked, spread

_MOST = 30


def told(one: Outcome) -> dict[str, Any]:
    """An outcome in plain values, for programs."""
    return {
        "number": one.point.number,
        "setting": one.point.setting,
        "seed": one.point.seed,
        "values": dict(one.point.values),
        "fingerprint": one.point.fingerprint,
        "folder": one.point.folder,
        "state": one.state.value,
        "reason": one.reason,
        "monitor": one.point.monitor,
        "value": None if math.isnan(one.value) else one.value,
        "best": dict(one.best),
        "final": dict(one.final),
        "steps": one.steps,
        "seconds": one.seconds,
        "weights_sha256": one.weights_sha256,
        "mlflow_run_id": one.mlflow_run_id,
        "tries": one.tries,
    }


def print_settings(folder: SweepFolder, found: Sequence[Outcome], *, more: str = "") -> None:
    """The settings, the best first: the monitored metric's mean over seeds, its spread and confidence interval; and the command that says `more`."""
    console = _console()
    counts = Counter(one.state.value for one in found)
    console.print(f"{folder.id}: " + ", ".join(f"{count} {state}" for state, count in counts.items()), markup=False)
    if not found:
        return
    console.print(settings_table(found))
    best = next((one for one in ranked(found)[0] if one.state is State.finished and not math.isnan(one.value)), None)
    if best:
        console.print(f"best     {label(best.point.values)}\nfolder   {best.point.folder}", markup=False)
        if more:
            console.print(f"report   {more}", markup=False)
    for one in found:
        if one.state is State.failed:
            console.print(f"failed   {one.point.label}: {one.reason} ({folder.log(one.point.number)})", style="red", markup=False)


def print_pages(folder: SweepFolder, found: Sequence[Outcome]) -> None:
    """Where its runs stand side by side in the MLflow UI; nothing where they are not in MLflow."""
    known = pages(folder, found)
    if known is None:
        return
    console = _console()
    opens = f" (after `{known.opens}`)" if known.opens else ""
    console.print(f"compare  {known.compare}{opens}\ntable    {known.table}", markup=False)


def print_effects(effects: Sequence[Effect]) -> None:
    """What each parameter does, the strongest first."""
    if not effects:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("parameter", "share", "rank correlation", "mean of each value"):
        table.add_column(name, justify="right" if name in ("share", "rank correlation") else "left")
    for one in effects:
        share = "" if math.isnan(one.share) else f"{one.share:.0%}"
        correlation = "" if one.correlation is None else f"{one.correlation:+.2f}"
        levels = "  ".join(f"{short(level.name)}: {number(level.spread.mean)}{' (best)' if level.name == one.best else ''}" for level in one.levels)
        table.add_row(one.key.lstrip("+~"), share, correlation, levels)
    console = _console()
    console.print()
    console.print(table)
    console.print()


def print_cost(spent: Cost) -> None:
    """What the sweep has taken."""
    lost = f", {clock(spent.lost_s)} on runs that failed" if spent.lost_s >= 1 else ""
    print(f"cost     {clock(spent.training_s)} of training, {spent.steps} steps, {spent.tries} jobs started, {clock(spent.span_s)} in all{lost}")


def settings_table(found: Sequence[Outcome]) -> Table:
    """The table that `print_settings` prints."""
    several = any(one.point.seed is not None for one in found)
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = list(dict.fromkeys(key for one in found for key in one.point.values))
    for name in names:
        table.add_column(name.lstrip("+~"))
    table.add_column(found[0].point.monitor, justify="right")
    if several:
        table.add_column("std", justify="right")
        table.add_column("95 % interval", justify="right")
        table.add_column("seeds", justify="right")
    table.add_column("state")
    table.add_column("time", justify="right")
    for setting in ranked(found)[:_MOST]:
        total = spread(setting)
        cells = [short(setting[0].point.values.get(name, "")) for name in names]
        cells.append(number(total.mean if total.count else setting[0].value))
        if several:
            interval = f"{total.mean - total.margin:.4g} to {total.mean + total.margin:.4g}" if not math.isnan(total.margin) else ""
            cells += [number(total.deviation), interval, str(total.count)]
        states = Counter(one.state.value for one in setting)
        cells += [", ".join(states) if len(setting) == 1 else ", ".join(f"{count} {state}" for state, count in states.items())]
        cells.append(clock(sum(one.seconds for one in setting)))
        table.add_row(*cells)
    return table


def print_points(folder: SweepFolder, found: Sequence[Outcome], *, held: tuple[int, str] | None) -> None:
    """Every point and where it stands."""
    console = _console()
    counts = Counter(one.state.value for one in found)
    console.print(f"{folder.id}: " + ", ".join(f"{count} {state}" for state, count in counts.items()), markup=False)
    if held:
        console.print(f"run by process {held[0]} on {held[1]}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "point", "state", "step", found[0].point.monitor if found else "metric", "reason"):
        table.add_column(name)
    for one in found:
        table.add_row(str(one.point.number + 1), one.point.label, one.state.value, str(one.steps or ""), number(one.value), one.reason)
    console.print(table)


def _console() -> Console:
    """Standard output; a pipe or a file is as wide as a table needs."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=400)


def number(value: float) -> str:
    """Four digits; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"
