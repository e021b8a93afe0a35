"""A sweep as a self-contained HTML page, and as CSV. Imports neither torch nor mlflow."""

from __future__ import annotations

import csv
import html
import io
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from samewise.runner.errors import Problem, first_line, number_of, raised_at
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.secrets import plain_cell, redact
from samewise.runner.sweeps.report.comparison import Pages
from samewise.runner.sweeps.report.curves import Cost
from samewise.runner.sweeps.report.effects import Effect, left_out
from samewise.runner.sweeps.report.plots import (
    curves_plot,
    effects_plot,
    objectives_plot,
    seeds_plot,
)
from samewise.runner.sweeps.report.rows import (
    PARETO,
    Row,
    columns,
    cost_in_words,
    count_points,
    effect_rows,
    front_rows,
    not_best,
    point_rows,
    setting_rows,
)
from samewise.runner.sweeps.results import PointResult, State
from samewise.runner.sweeps.settings import goals

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #eee; white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font-size: 13px; background: #f5f5f5; padding: .1em .3em; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; } .failed { color: #b00020; } .pruned, .interrupted { color: #8a6d00; } p.note { color: #666; font-size: 13px; }
"""


def page(
    folder: SweepFolder,
    found: Sequence[PointResult],
    effects: Sequence[Effect],
    spent: Cost,
    pages: Pages | None,
) -> str:
    """The page; `pages` are those of the MLflow UI."""
    several = any(one.point.seed is not None for one in found)
    alike = len(goals(found)) == 1
    objective = found[0].objective.removeprefix("final/")
    parts = [
        _head(folder, found, spent, pages),
        "<h2>Settings, the best first</h2>" if alike else "<h2>Settings</h2>",
        table(setting_rows(found)),
    ]
    if note := not_best(found):
        parts.append(f"<p class=note>{note}</p>")
    if front := front_rows(found):
        parts += [f"<h2>{PARETO}</h2>", _draw(objectives_plot, found), table(front)]
    if effects:
        parts += [
            "<h2>Effect of each parameter</h2>",
            _draw(effects_plot, found, effects),
            table(effect_rows(effects)),
            "<p class=note>The share is eta squared: the part of the variance between "
            "settings that lies between the parameter's values, one parameter at a "
            "time. Black: the mean over all settings with the value, and its 95 % interval.</p>",
        ]
    if note := left_out(found):
        parts.append(f"<p class=note>{note}</p>")
    if several and alike:
        parts += ["<h2>Spread over seeds</h2>", _draw(seeds_plot, found)]
    for metric in dict.fromkeys([objective, "train/loss"]):
        if plot := _draw(curves_plot, found, metric):
            parts += [f"<h2>{html.escape(metric)} by step</h2>", plot]
    parts += ["<h2>Every point</h2>", table(point_rows(found), state=True)]
    return document(folder.id, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A self-contained page without passwords and tokens. `parts` are HTML."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return redact(
        "\n".join(
            [
                "<!doctype html>",
                f'<html lang="en"><head>{head}</head>',
                "<body>",
                *parts,
                "</body></html>",
                "",
            ]
        )
    )


def _draw(plot: Callable[..., str], *given: Any) -> str:
    """A plot; if it fails, empty with a warning, since the tables do not depend on it."""
    try:
        return plot(*given)
    except Exception as error:  # any error of matplotlib, or in the results
        reason = f"cannot be drawn: {type(error).__name__}: {first_line(error)}"
        print(
            f"warning: {Problem(plot.__name__.replace('_', ' '), reason, hint=raised_at(error))}",
            file=sys.stderr,
        )
        return ""


def _head(
    folder: SweepFolder, found: Sequence[PointResult], spent: Cost, pages: Pages | None
) -> str:
    lines = [
        f"<h1>{html.escape(folder.id)}</h1>",
        f"<p><code>samewise sweep {html.escape(shlex.join(folder.facts['overrides']))}</code></p>",
    ]
    lines.append(
        f"<p>{number_of(len(found), 'point')}: {count_points(found)}. {cost_in_words(spent)}.</p>"
    )
    if pages:
        opens = f" (after <code>{html.escape(pages.opens)}</code>)" if pages.opens else ""
        links = (
            f'<a href="{html.escape(pages.compare)}">side by side</a>, <a '
            f'href="{html.escape(pages.table)}">in the table of runs</a>'
        )
        lines.append(f"<p>In the MLflow UI{opens}: {links}.</p>")
    return "\n".join(lines)


def table(rows: Sequence[Row], *, state: bool = False) -> str:
    """Rows as HTML; with `state`, those of unfinished runs are highlighted."""
    names = columns(rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = list[str]()
    for row in rows:
        shade = f' class="{row["state"]}"' if state and row["state"] != State.finished.value else ""
        cells = "".join(f"<td>{html.escape(str(row.get(name, '')))}</td>" for name in names)
        lines.append(f"<tr{shade}>{cells}</tr>")
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(lines) + "\n</tbody></table>"
    )


def as_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV without passwords, tokens and cells that a spreadsheet would take for formulas."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns(rows), lineterminator="\n")
    writer.writerow({name: plain_cell(name) for name in columns(rows)})
    writer.writerows({name: plain_cell(value) for name, value in row.items()} for row in rows)
    return redact(out.getvalue())
