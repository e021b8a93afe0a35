"""The view and description of an experiment's page in MLflow: which runs, their order, columns and
charts.

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
"""The view of all of an MLflow experiment's runs; those of parts of it begin with this."""
FOR_TRAINING = "workflowType=machine_learning"
"""In an address: the sidebar for training models, and not that for language models."""
_COLUMNS = 6
_AXES = 4
_COMPARED = 20
_LISTED = 20
_LONGEST = 5000
"""Characters of a tag that every store takes."""
_WIDTHS = {"attributes.`Run Name`": 340, "runDateAndNestInfo": 150}
_WIDTH = 130
"""Of a column, in pixels."""
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
        """The metric that most of them monitor, by its name in MLflow."""
        return Counter(_monitor(run) for run in self.runs).most_common(1)[0][0]

    @property
    def is_lower_better(self) -> bool:
        """Whether its lowest value is the best."""
        return (
            next(
                (
                    run.params.get("evaluate.mode")
                    for run in self.runs
                    if _monitor(run) == self.monitor
                ),
                "",
            )
            == "min"
        )

    @property
    def sort_metric(self) -> str:
        """The metric to sort by: the best value of the monitored one, or its last if older versions
        of samewise logged no other.
        """
        best = column(self.monitor)
        return best if any(best in run.metrics for run in self.runs) else self.monitor

    def best_first(self) -> list[StoredRun]:
        """The runs with a value, the best first."""
        known = [
            run for run in self.runs if not math.isnan(run.metrics.get(self.sort_metric, math.nan))
        ]
        return sorted(
            known, key=lambda run: run.metrics[self.sort_metric], reverse=not self.is_lower_better
        )

    def address(self, experiment: str) -> str:
        """The page's address, without the server's."""
        return f"#/experiments/{experiment}/runs?viewStateShareKey={quote(self.key)}&{FOR_TRAINING}"


def _monitor(run: StoredRun) -> str:
    named = run.params.get("evaluate.monitor")
    return key(named) if named else ""


def parts(runs: Sequence[StoredRun]) -> list[Part]:
    """An MLflow experiment's runs in parts: all, those of each experiment file if there are
    several, and those of each sweep; the latest first.
    """
    files, sweeps = dict[str, list[StoredRun]](), dict[str, list[StoredRun]]()
    for run in sorted(runs, key=lambda run: -run.start):
        files.setdefault(run.params.get("choices.experiment", ""), []).append(run)
        if sweep := run.tags.get("sweep"):
            sweeps.setdefault(sweep, []).append(run)
    found = [Part(KEY, (next(iter(files)) if len(files) == 1 else "") or "all runs", "", runs)]
    if len(files) > 1:
        found = [
            Part(f"{KEY}-{name}", name, f"params.`choices.experiment` = '{name}'", some)
            for name, some in files.items()
            if name
        ] + found
    return found + [
        Part(f"{KEY}-sweep-{name}", f"sweep {name}", f"tags.`sweep` = '{name}'", some)
        for name, some in list(sweeps.items())[:_LISTED]
    ]


def varying(params: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings in which runs of one experiment file differ, most informative first.

    Before them the file, if there are several.
    """
    groups = dict[str, list[Mapping[str, str]]]()
    for one in params:
        groups.setdefault(one.get("choices.experiment", ""), []).append(one)
    values = dict[str, int]()
    for group in groups.values():
        for name in {name for one in group for name in one}:
            if not (name.startswith("choices.") or is_outside(name)):
                values[name] = max(values.get(name, 1), len({one.get(name) for one in group}))
    found = sorted(
        (name for name, count in values.items() if count > 1),
        key=lambda name: (-values[name], name),
    )
    return (["choices.experiment"] if len(groups) > 1 else []) + found[:_COLUMNS]


def view(part: Part) -> dict[str, Any]:
    """The page's view: the best run first, columns for what differs, charts starting with the
    monitored metric.
    """
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
        # Otherwise MLflow sorts the sections by name
        "isAccordionReordered": True,
        **order,
    }


def _charts(part: Part, differing: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """Settings against the best value.

    The best values; the monitored metric by step; then all other metrics by section.
    """
    sections = dict.fromkeys(name.rpartition("/")[0] for name in (part.sort_metric, *metrics))
    named = sorted(
        sections,
        key=lambda name: (
            _SECTIONS.index(name) if name in _SECTIONS else len(_SECTIONS) + (name in _FOLDED),
            name,
        ),
    )
    first = f"best by {part.monitor}"
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
            first,
            selectedParams=axes,
            selectedMetrics=[part.sort_metric],
            showAllRuns=False,
            runsCountToCompare=_COMPARED,
        )
    if part.sort_metric in metrics:
        card("BAR", first, metricKey=part.sort_metric, runsCountToCompare=_COMPARED)
    taken = {part.sort_metric}
    for name in dict.fromkeys([*(name for name in (part.monitor,) if name in metrics), *metrics]):
        if name not in taken:
            card("LINE", first if name == part.monitor else name.rpartition("/")[0], **_line(name))
    used = {one["metricSectionId"] for one in cards}
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
                "columns": 2 if name == first else 3,
            }
            for name in [first, *named]
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


def note(experiment: str, found: Sequence[Part]) -> str:
    """The description: the best run and what distinguishes it, for the part that MLflow opens.

    How to read the page; and the other parts.
    """
    lines = [line for part in found if (line := _line_of(experiment, part))]
    read = (
        "Below are the runs, the best first; the columns after the metric are the settings "
        "in which they differ. The second icon above the table shows "
        f"charts, which begin with the monitored metric. `{PREFIX}METRIC` is the best "
        "value of a run so far, `valid/...` are evaluations, `train/...` steps. "
        "Select runs and press *Compare* to see what differs between them."
    )
    text = "\n\n".join([*lines[:1], read])
    for line in lines[1:]:
        if len(text) + len(line) < _LONGEST - 10:
            text += f"\n\n- {line}" if text.endswith(read) else f"\n- {line}"
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
    if apart := set_apart(best[0], best):
        text += f", with {apart}"
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


def set_apart(best: StoredRun, runs: Sequence[StoredRun]) -> str:
    """The settings in which the best run differs from the others, with its value and theirs."""
    told = list[str]()
    for name in varying([run.params for run in runs]):
        others = sorted(
            {run.params.get(name, "none") for run in runs} - {best.params.get(name, "none")},
            key=_by_number,
        )
        if others and name != "choices.experiment":
            told.append(
                f"{name} **{_plain(best.params.get(name, 'none'))}** (not "
                f"{_plain(', '.join(others[:5]))}{', ...' if len(others) > 5 else ''})"
            )
    return ", ".join(told[:3])


def _plain(text: str) -> str:
    """Escape a name so that it contains no Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|~])", r"\\\1", " ".join(text.split()))[:200]


def _by_number(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text
