"""A sweep on the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from samewise.runner.sweep.folder import SweepFolder, label
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


def print_settings(folder: SweepFolder, found: Sequence[Outcome]) -> None:
    """The settings, the best first: the monitored metric's mean over seeds, its spread and confidence interval."""
    console = Console(highlight=False, soft_wrap=True)
    counts = Counter(one.state.value for one in found)
    console.print(f"{folder.id}: " + ", ".join(f"{count} {state}" for state, count in counts.items()), markup=False)
    if not found:
        return
    console.print(settings_table(found))
    best = next((one for one in ranked(found)[0] if one.state is State.finished), None)
    if best:
        console.print(f"best     {label(best.point.values)}\nfolder   {best.point.folder}\nreport   samewise report {folder.path}", markup=False)
    for one in found:
        if one.state is State.failed:
            console.print(f"failed   {one.point.label}: {one.reason} ({folder.log(one.point.number)})", style="red", markup=False)


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
        cells = [setting[0].point.values.get(name, "") for name in names]
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
    console = Console(highlight=False, soft_wrap=True)
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


def number(value: float) -> str:
    """Four digits; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"
