"""The page that `samewise ui` opens: an experiment's runs, the best first, with the columns in which they differ.

MLflow keeps a view of an experiment's runs as a tag of it (`mlflow.sharedViewState.KEY`), which `viewStateShareKey=KEY` in an address opens;
`workflowType` chooses the sidebar for training over that for language models. So it stands in the source of MLflow 3.17's pages. Speaks HTTP to
a server of ours, and imports neither torch nor mlflow.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from samewise.runner.config.fingerprint import is_outside

_KIND = "mlflow.experimentKind"
_VIEW = "mlflow.sharedViewState."
_KEY = "samewise"
_NOTE = "mlflow.note.content"
_RUNS = 300
"""Of an experiment, the latest; more are not looked at for what differs."""
_COLUMNS = 6
_SECONDS = 30.0


def prepare(base: str) -> str:
    """Arrange the pages of all experiments with runs of samewise, and give the address of that with the latest run.

    Args:
        base: The server's address.

    Returns:
        The list of experiments where none has such runs, or the server answers otherwise than expected: then MLflow's pages are as they come.
    """
    try:
        found = _ask(base, "experiments/search", {"max_results": 200, "order_by": ["last_update_time DESC"]}).get("experiments", [])
        latest = dict[str, int]()
        for experiment in found:
            runs = [_Run(one) for one in _ask(base, "runs/search", _query(experiment["experiment_id"])).get("runs", [])]
            if runs := [run for run in runs if "samewise.fingerprint" in run.tags]:
                latest[experiment["experiment_id"]] = max(run.start for run in runs)
                _arrange(base, experiment, runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{base}/#/experiments"
    if not latest:
        return f"{base}/#/experiments"
    return f"{base}/#/experiments/{max(latest, key=lambda experiment: latest[experiment])}/runs?viewStateShareKey={_KEY}&workflowType=machine_learning"


class _Run:
    """What a run's entry says."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        data: Mapping[str, Any] = entry.get("data", {})
        self.start = int(entry["info"].get("start_time") or 0)
        self.tags = {tag["key"]: tag["value"] for tag in data.get("tags", [])}
        self.params = {param["key"]: param["value"] for param in data.get("params", [])}
        self.metrics = {metric["key"] for metric in data.get("metrics", [])}


def _query(experiment: str) -> dict[str, Any]:
    return {"experiment_ids": [experiment], "max_results": _RUNS, "order_by": ["attributes.start_time DESC"]}


def _arrange(base: str, experiment: Mapping[str, Any], runs: Sequence[_Run]) -> None:
    """Say what kind of experiment it is, how to read its page, and what the page shows. What a user has set stays."""
    has = {tag["key"] for tag in experiment.get("tags", [])}
    monitor = Counter(run.params.get("evaluate.monitor", "") for run in runs).most_common(1)[0][0]
    shown = [name for name, count in Counter(name for run in runs for name in run.metrics).items() if 2 * count >= len(runs)]
    metrics = dict.fromkeys((*(monitor,) * (monitor in shown), *sorted(name for name in shown if name.startswith("valid/"))))
    columns = [f"metrics.`{name}`" for name in list(metrics)[:3]] + [f"params.`{name}`" for name in varying([run.params for run in runs])]
    view: dict[str, Any] = {"selectedColumns": ["attributes.`Duration`", *columns], "searchFilter": ""}
    if monitor in shown:
        lower = next(run.params.get("evaluate.mode") for run in runs if run.params.get("evaluate.monitor") == monitor) == "min"
        view |= {"orderByKey": f"metrics.`{monitor}`", "orderByAsc": lower}
    note = (
        f"Runs of samewise, the best `{monitor}` first; the columns after the metrics are the settings in which runs differ. "
        "`samewise ui` arranges this page anew; `samewise runs --diff` shows the same in a terminal."
    )
    given = {_KIND: "custom_model_development", _NOTE: note}
    for key, value in {**{key: value for key, value in given.items() if key not in has}, f"{_VIEW}{_KEY}": json.dumps(view)}.items():
        _ask(base, "experiments/set-experiment-tag", {"experiment_id": experiment["experiment_id"], "key": key, "value": value})


def varying(params: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings in which runs of one experiment file differ, those that most runs tell apart first; before them the file, where there are several."""
    groups = defaultdict[str, list[Mapping[str, str]]](list)
    for one in params:
        groups[one.get("choices.experiment", "")].append(one)
    values = dict[str, int]()
    for group in groups.values():
        for name in {name for one in group for name in one}:
            if not (name.startswith("choices.") or is_outside(name)):
                values[name] = max(values.get(name, 1), len({one.get(name) for one in group}))
    found = sorted((name for name, count in values.items() if count > 1), key=lambda name: (-values[name], name))
    return (["choices.experiment"] if len(groups) > 1 else []) + found[:_COLUMNS]


def _ask(base: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{base}/api/2.0/mlflow/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        return json.load(answer)
