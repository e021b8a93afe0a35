"""A sweep as one HTML page that needs nothing else, and as CSV. Imports neither torch nor mlflow."""

from __future__ import annotations

import csv
import html
import io
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from samewise.runner.records.sweep_folder import Point, SweepFolder, label, short
from samewise.runner.sweep.comparison import Pages
from samewise.runner.sweep.curves import Cost
from samewise.runner.sweep.effects import Effect, pareto
from samewise.runner.sweep.plots import curves_plot, effects_plot, objectives_plot, seeds_plot
from samewise.runner.sweep.progress import clock
from samewise.runner.sweep.results import Outcome, State, ranked, spread
from samewise.runner.sweep.tables import number

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #eee; white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font-size: 13px; background: #f5f5f5; padding: .1em .3em; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; } .failed { color: #b00020; } .pruned, .interrupted { color: #8a6d00; } p.note { color: #666; font-size: 13px; }
"""


def page(
    folder: SweepFolder, found: Sequence[Outcome], effects: Sequence[Effect], spent: Cost, pages: Pages | None, objectives: Mapping[str, str] | None = None
) -> str:
    """The page.

    Args:
        folder: The sweep's.
        found: Its points.
        effects: Of its parameters.
        spent: What it has taken.
        pages: In the MLflow UI; None: there are none.
        objectives: min or max, for each metric, where there are several.
    """
    several = any(one.point.seed is not None for one in found)
    monitor = found[0].point.monitor
    parts = [_head(folder, found, spent, pages), "<h2>Settings, the best first</h2>", _table(_settings(found, several=several))]
    if objectives and len(objectives) > 1:
        parts += ["<h2>Objectives: what no other point beats in all</h2>", objectives_plot(found, objectives), _table(_front(found, objectives))]
    if effects:
        parts += [
            "<h2>Effect of each parameter</h2>",
            effects_plot(found, effects),
            _table(_effects(effects)),
            "<p class=note>The share is eta squared: the part of the variance between settings that lies between the parameter's values, one parameter at a "
            "time. Black: the mean over all settings with the value, and its 95 % interval.</p>",
        ]
    if several:
        parts += ["<h2>Spread over seeds</h2>", seeds_plot(found)]
    for metric in dict.fromkeys([monitor, "train/loss"]):
        if plot := curves_plot(found, metric):
            parts += [f"<h2>{html.escape(metric)} by step</h2>", plot]
    parts += ["<h2>Every point</h2>", _table(_points(found), state=True)]
    head = f'<meta charset="utf-8"><title>{html.escape(folder.id)}</title><style>{_STYLE}</style>'
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}</head>', "<body>", *parts, "</body></html>", ""])


def settings_csv(found: Sequence[Outcome]) -> str:
    """One line a setting, the best first."""
    return _csv(_settings(found, several=True, exact=True))


def points_csv(found: Sequence[Outcome]) -> str:
    """One line a point, with all metrics at its best step (best/...) and at its end (final/...)."""
    rows = list[dict[str, Any]]()
    for one, row in zip(found, _points(found, exact=True), strict=True):
        rows.append({**row, **{f"best/{name}": value for name, value in one.best.items()}, **{f"final/{name}": value for name, value in one.final.items()}})
    return _csv(rows)


def _head(folder: SweepFolder, found: Sequence[Outcome], spent: Cost, pages: Pages | None) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in Counter(one.state.value for one in found).items())
    lines = [f"<h1>{html.escape(folder.id)}</h1>", f"<p><code>samewise sweep {html.escape(shlex.join(folder.facts['overrides']))}</code></p>"]
    lost = f", {clock(spent.lost_s)} of it on runs that failed" if spent.lost_s >= 1 else ""
    took = f"{clock(spent.training_s)} of training, {spent.steps} steps, {spent.tries} jobs started, {clock(spent.span_s)} from the first to the last{lost}"
    lines.append(f"<p>{len(found)} points: {counts}. {took}.</p>")
    if pages:
        opens = f" (after <code>{html.escape(pages.opens)}</code>)" if pages.opens else ""
        links = f'<a href="{html.escape(pages.compare)}">side by side</a>, <a href="{html.escape(pages.table)}">in the table of runs</a>'
        lines.append(f"<p>In the MLflow UI{opens}: {links}.</p>")
    return "\n".join(lines)


def _settings(found: Sequence[Outcome], *, several: bool, exact: bool = False) -> list[dict[str, Any]]:
    monitor = found[0].point.monitor
    show = _exact if exact else number
    rows = list[dict[str, Any]]()
    for setting in ranked(found):
        total = spread(setting)
        row: dict[str, Any] = _values(setting[0].point, exact=exact)
        row[monitor] = show(total.mean if total.count else setting[0].value)
        if several:
            low, high = (total.mean - total.margin, total.mean + total.margin) if not math.isnan(total.margin) else (math.nan, math.nan)
            row |= {"std": show(total.deviation), "95 % from": show(low), "95 % to": show(high), "seeds": total.count}
        row["state"] = ", ".join(f"{count} {state}" for state, count in Counter(one.state.value for one in setting).items())
        row["training s"] = f"{sum(one.seconds for one in setting):.1f}"
        rows.append(row)
    return rows


def _values(point: Point, *, exact: bool) -> dict[str, str]:
    return {key.lstrip("+~"): value if exact else short(value) for key, value in point.values.items()}


def _front(found: Sequence[Outcome], objectives: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"point": label(one.point.values, one.point.seed), **{name: number(one.best[name]) for name in objectives}} for one in pareto(found, objectives)]


def _effects(effects: Sequence[Effect]) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for effect in effects:
        for level in effect.levels:
            rows.append(
                {
                    "parameter": effect.key.lstrip("+~"),
                    "share": "" if math.isnan(effect.share) else f"{effect.share:.0%}",
                    "rank correlation": "" if effect.correlation is None else f"{effect.correlation:+.2f}",
                    "value": short(level.name),
                    "mean": number(level.spread.mean),
                    "std": number(level.spread.deviation),
                    "settings": level.spread.count,
                    "": "best" if level.name == effect.best else "",
                }
            )
    return rows


def _points(found: Sequence[Outcome], *, exact: bool = False) -> list[dict[str, Any]]:
    show = _exact if exact else number
    rows = list[dict[str, Any]]()
    for one in found:
        point = one.point
        row: dict[str, Any] = {"point": point.number + 1, **_values(point, exact=exact)}
        row |= {"seed": point.seed} if point.seed is not None else {}
        row |= {"state": one.state.value, point.monitor: show(one.value), "steps": one.steps, "training s": f"{one.seconds:.1f}", "tries": one.tries}
        row |= {"weights sha256": one.weights_sha256 if exact else one.weights_sha256[:12], "folder": point.folder, "reason": one.reason}
        rows.append(row)
    return rows


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _table(rows: Sequence[Mapping[str, Any]], *, state: bool = False) -> str:
    columns = _columns(rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = list[str]()
    for row in rows:
        shade = f' class="{row["state"]}"' if state and row["state"] != State.finished.value else ""
        lines.append(f"<tr{shade}>{''.join(_cells(row.get(name, '') for name in columns))}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"


def _cells(values: Iterable[Any]) -> Iterable[str]:
    return (f"<td>{html.escape(str(value))}</td>" for value in values)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _exact(value: float) -> str:
    return "" if math.isnan(value) else repr(value)
