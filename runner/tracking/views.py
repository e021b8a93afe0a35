"""The view and description of an experiment's page in MLflow: runs, order, columns and charts.

A view is MLflow's own state of that page, as its *Share* writes it: the names are those of
`ExperimentPageUIState` and `RunsChartsCardConfig` in the source of the pages of MLflow 3.17 and
3.18. Imports neither torch nor mlflow.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from samewise.runner.config.fingerprint import is_outside
from samewise.runner.errors import number_of
from samewise.runner.tracking.best import PREFIX, column
from samewise.runner.tracking.describing import key

KEY = "samewise"
"""Key of the view of all of an MLflow experiment's runs; the keys of its parts begin with it."""
FOR_TRAINING = "workflowType=machine_learning"
"""Part of an address that chooses the sidebar for training, instead of that for language models."""
_COLUMNS = 6
_AXES = 4
_COMPARED = 20
_LISTED = 20
_LONGEST = 5000
"""Maximum number of characters of a tag that every store takes."""
_WIDTHS = {"attributes.`Run Name`": 340, "runDateAndNestInfo": 150}
_WIDTH = 130
"""Width of a column in pixels."""
_SECTIONS = ("best", "valid", "ema/valid", "train")
_FOLDED = ("speed", "system")
"""Sections of charts that are closed at first."""


class StoredRun:
    """A run's entry in MLflow."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        data: Mapping[str, Any] = entry.get("data", {})
        self.id = str(entry["info"]["run_id"])
        self.name = str(entry["info"].get("run_name") or self.id)
        self.start = int(entry["info"].get("start_time") or 0)
        self.tags: dict[str, str] = {tag["key"]: tag["value"] for tag in data.get("tags", [])}
        self.params: dict[str, str] = {
            param["key"]: param["value"] for param in data.get("params", [])
        }
        self.metrics: dict[str, float] = {
            metric["key"]: float(metric["value"]) for metric in data.get("metrics", [])
        }


@dataclass(frozen=True)
class Part:
    """Comparable runs of an MLflow experiment.

    `where` is MLflow's filter for them, empty for all.
    """

    key: str
    title: str
    where: str
    runs: Sequence[StoredRun]

    @property
    def monitor(self) -> str:
        """The metric that most of the runs monitor, by its name in MLflow."""
        return Counter(_monitor(run) for run in self.runs).most_common(1)[0][0]

    @property
    def is_lower_better(self) -> bool:
        """Whether the metric's lowest value is the best."""
        monitor = self.monitor
        modes = (run.params.get("evaluate.mode") for run in self.runs if _monitor(run) == monitor)
        return next(modes, "") == "min"

    @property
    def sort_metric(self) -> str:
        """The metric by which runs are sorted: the best value of the monitored one.

        Older versions of samewise logged only its last value, by which their runs are sorted.
        """
        best = column(self.monitor)
        return best if any(best in run.metrics for run in self.runs) else self.monitor

    def best_first(self) -> list[StoredRun]:
        """Return the runs with a value, the best first."""
        runs = [
            run for run in self.runs if not math.isnan(run.metrics.get(self.sort_metric, math.nan))
        ]
        return sorted(
            runs, key=lambda run: run.metrics[self.sort_metric], reverse=not self.is_lower_better
        )

    def address(self, experiment: str) -> str:
        """Return the page's address, without the server's."""
        return f"#/experiments/{experiment}/runs?viewStateShareKey={quote(self.key)}&{FOR_TRAINING}"


def _monitor(run: StoredRun) -> str:
    name = run.params.get("evaluate.monitor")
    return key(name) if name else ""


def parts(runs: Sequence[StoredRun]) -> list[Part]:
    """Divide an MLflow experiment's runs into parts.

    The parts are all runs, those of each experiment file if there are several, and those of each
    sweep, the latest first.
    """
    files, sweeps = dict[str, list[StoredRun]](), dict[str, list[StoredRun]]()
    for run in sorted(runs, key=lambda run: -run.start):
        files.setdefault(run.params.get("choices.experiment", ""), []).append(run)
        if sweep := run.tags.get("sweep"):
            sweeps.setdefault(sweep, []).append(run)
    run_parts = [Part(KEY, (next(iter(files)) if len(files) == 1 else "") or "all runs", "", runs)]
    if len(files) > 1:
        run_parts = [
            Part(f"{KEY}-{name}", name, f"params.`choices.experiment` = '{name}'", file_runs)
            for name, file_runs in files.items()
            if name
        ] + run_parts
    return run_parts + [
        Part(f"{KEY}-sweep-{name}", f"sweep {name}", f"tags.`sweep` = '{name}'", sweep_runs)
        for name, sweep_runs in list(sweeps.items())[:_LISTED]
    ]


def varying(params: Sequence[Mapping[str, str]]) -> list[str]:
    """List the settings in which runs of one experiment file differ, the most informative first.

    The experiment file comes before them, if there are several.
    """
    groups = dict[str, list[Mapping[str, str]]]()
    for run_params in params:
        groups.setdefault(run_params.get("choices.experiment", ""), []).append(run_params)
    counts = dict[str, int]()
    for group in groups.values():
        for name in {name for x in group for name in x}:
            if not (name.startswith("choices.") or is_outside(name)):
                counts[name] = max(counts.get(name, 1), len({x.get(name) for x in group}))
    names = sorted(
        (name for name, count in counts.items() if count > 1),
        key=lambda name: (-counts[name], name),
    )
    return (["choices.experiment"] if len(groups) > 1 else []) + names[:_COLUMNS]


def view(part: Part) -> dict[str, Any]:
    """Return the page's view: the best run first, columns for what differs, and charts."""
    differing = varying([run.params for run in part.runs])
    shown = [
        name
        for name, count in Counter(name for run in part.runs for name in run.metrics).items()
        if 2 * count >= len(part.runs)
    ]
    metrics = [
        f"metrics.`{name}`"
        for name in dict.fromkeys((part.sort_metric, part.monitor))
        if name in shown
    ]
    params = [f"params.`{name}`" for name in differing]
    columns = [*metrics[:1], *params, *metrics[1:], "attributes.`Duration`"]
    order = {"orderByKey": metrics[0], "orderByAsc": part.is_lower_better} if metrics else {}
    return {
        "selectedColumns": columns,
        "columnOrder": [*_WIDTHS, *columns],
        "columnWidths": {**_WIDTHS, **dict.fromkeys(columns, _WIDTH)},
        "searchFilter": part.where,
        **_charts(part, differing, sorted({name for run in part.runs for name in run.metrics})),
        # Without it MLflow sorts the sections by name
        "isAccordionReordered": True,
        **order,
    }


def _charts(part: Part, differing: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the charts: settings against the best value, best values, then metrics by section."""
    sections = dict.fromkeys(name.rpartition("/")[0] for name in (part.sort_metric, *metrics))
    ordered = sorted(
        sections,
        key=lambda name: (
            _SECTIONS.index(name) if name in _SECTIONS else len(_SECTIONS) + (name in _FOLDED),
            name,
        ),
    )
    best_section = f"best by {part.monitor}"
    cards = list[dict[str, Any]]()

    def card(kind: str, section: str, **more: Any) -> None:
        cards.append(
            {
                "uuid": f"{KEY}-{len(cards)}",
                "type": kind,
                "metricSectionId": section,
                "deleted": False,
                "isGenerated": False,
                **more,
            }
        )

    axes = [name for name in differing if name != "choices.experiment"][:_AXES]
    if axes and part.sort_metric in metrics:
        card(
            "PARALLEL",
            best_section,
            selectedParams=axes,
            selectedMetrics=[part.sort_metric],
            showAllRuns=False,
            runsCountToCompare=_COMPARED,
        )
    if part.sort_metric in metrics:
        card("BAR", best_section, metricKey=part.sort_metric, runsCountToCompare=_COMPARED)
    for name in dict.fromkeys([*(name for name in (part.monitor,) if name in metrics), *metrics]):
        if name != part.sort_metric:
            card(
                "LINE",
                best_section if name == part.monitor else name.rpartition("/")[0],
                **_line(name),
            )
    used = {card["metricSectionId"] for card in cards}
    return {
        "compareRunCharts": cards,
        "compareRunSections": [
            {
                "uuid": name,
                "name": name or "epoch",
                "display": name not in _FOLDED,
                "isReordered": True,
                "deleted": False,
                "isGenerated": False,
                "columns": 2 if name == best_section else 3,
            }
            for name in [best_section, *ordered]
            if name in used
        ],
    }


def _line(name: str) -> dict[str, Any]:
    return {
        "metricKey": name,
        "selectedMetricKeys": [name],
        "xAxisKey": "step",
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "lineSmoothness": 0,
        "range": {},
        "runsCountToCompare": 10,
    }


def note(experiment: str, run_parts: Sequence[Part]) -> str:
    """Return the experiment's description: its best run, how to read the page, other parts."""
    lines = [line for part in run_parts if (line := _line_of(experiment, part))]
    guide = (
        "Below are the runs, the best first; the columns after the metric are the settings "
        "in which they differ. The second icon above the table shows "
        f"charts, which begin with the monitored metric. `{PREFIX}METRIC` is the best "
        "value of a run so far, `valid/...` are evaluations, `train/...` steps. "
        "Select runs and press *Compare* to see what differs between them."
    )
    text = "\n\n".join([*lines[:1], guide])
    for line in lines[1:]:
        if len(text) + len(line) < _LONGEST - 10:
            text += f"\n\n- {line}" if text.endswith(guide) else f"\n- {line}"
    return text


def _line_of(experiment: str, part: Part) -> str:
    if not (best := part.best_first()):
        return ""
    label = best[0].name.removesuffix(f" ({best[0].params.get('choices.experiment')})")
    name = f"[{_plain(label)}](#/experiments/{experiment}/runs/{best[0].id})"
    text = (
        f"**[{part.title}]({part.address(experiment)})**: best of {len(best)} is {name}, "
        f"`{part.monitor}` **{best[0].metrics[part.sort_metric]:.4g}**"
    )
    if (
        ties := sum(
            run.metrics[part.sort_metric] == best[0].metrics[part.sort_metric] for run in best
        )
        - 1
    ):
        text += f" (equally good: {ties} other{'s' * (ties > 1)})"
    if settings := distinguishing_settings(best[0], best):
        text += f", with {settings}"
    if rest := len(part.runs) - len(best):
        text += (
            f"; not compared: {number_of(rest, 'run')} with another monitored metric or "
            "without a value"
        )
    if len(best) > 1:
        ids = json.dumps([run.id for run in best[: _COMPARED // 2]], separators=(",", ":"))
        text += (
            " ([compare the "
            f"best](#/compare-runs?runs={quote(ids)}&experiments={quote(json.dumps([experiment]))}&{FOR_TRAINING}))"
        )
    return text


def distinguishing_settings(best: StoredRun, runs: Sequence[StoredRun]) -> str:
    """Return the settings in which the best run differs from the others, with all values."""
    texts = list[str]()
    for name in varying([run.params for run in runs]):
        other_values = sorted(
            {run.params.get(name, "none") for run in runs} - {best.params.get(name, "none")},
            key=_by_number,
        )
        if other_values and name != "choices.experiment":
            texts.append(
                f"{name} **{_plain(best.params.get(name, 'none'))}** (not "
                f"{_plain(', '.join(other_values[:5]))}{', ...' if len(other_values) > 5 else ''})"
            )
    return ", ".join(texts[:3])


def _plain(text: str) -> str:
    """Escape a name so that it contains no Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|~])", r"\\\1", " ".join(text.split()))[:200]


def _by_number(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text
