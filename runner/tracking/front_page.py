"""Prepares the page that `samewise ui` opens: the runs of the latest experiment, the best first.

MLflow keeps a view of an experiment's runs as a tag of it (`mlflow.sharedViewState.KEY`), which
`viewStateShareKey=KEY` in an address opens; `workflowType` chooses the sidebar for training instead
of that for language models. Both, and the names in the view (`ExperimentPageUIState`), are as in
the source of the pages of MLflow 3.17 and 3.18. Speaks HTTP to samewise's own server, and imports
neither torch nor mlflow.
"""

import base64
import json
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from samewise.runner.config.fingerprint import is_outside
from samewise.runner.records import tested
from samewise.runner.tracking.best import column
from samewise.runner.tracking.describing import key

_KEY = "samewise"
_KIND = "mlflow.experimentKind"
_VIEW = f"mlflow.sharedViewState.{_KEY}"
_RUNS = 300
"""Maximum number of the latest runs that are compared."""
_COLUMNS = 6
_WIDTHS = {"attributes.`Run Name`": 340, "runDateAndNestInfo": 150}
_WIDTH = 130
"""Width of a column in pixels."""
_SECONDS = 30.0


def prepare(base: str) -> str:
    """Set up the page of the runs of the latest experiment, and return its address.

    Returns the list of experiments if there are no such runs, MLflow is newer than tested, or the
    server's answer is unexpected: then MLflow's pages stay as they are.
    """
    if tested.is_newer("mlflow"):
        return f"{base}/#/experiments"
    try:
        experiments = {
            str(experiment["experiment_id"]): experiment
            for experiment in _ask(base, "experiments/search", {"max_results": 200})["experiments"]
        }
        query = {
            "experiment_ids": list(experiments),
            "filter": "tags.`samewise.fingerprint` != ''",
            "max_results": _RUNS,
            "order_by": ["attributes.start_time DESC"],
        }
        runs = _ask(base, "runs/search", query)["runs"]
        experiment = experiments[str(runs[0]["info"]["experiment_id"])]
        here = [x for x in runs if x["info"]["experiment_id"] == experiment["experiment_id"]]
        _arrange(base, experiment, view([_values(run) for run in here]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"{base}/#/experiments"
    return (
        f"{base}/#/experiments/{experiment['experiment_id']}/runs?viewStateShareKey={_KEY}"
        "&workflowType=machine_learning"
    )


def _values(run: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a run's params and metrics by name."""
    return {
        kind: {entry["key"]: entry["value"] for entry in run["data"].get(kind, [])}
        for kind in ("params", "metrics")
    }


def view(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the view of the runs of the latest run's experiment file.

    They are sorted by the best value of the latest run's monitored metric, with columns for the
    settings in which they differ.

    Args:
        runs: Params and metrics of each run, the latest first.
    """
    latest: Mapping[str, str] = runs[0]["params"]
    file = latest.get("choices.experiment", "")
    runs = [run for run in runs if run["params"].get("choices.experiment", "") == file]
    monitor = latest.get("evaluate.monitor", "")
    # Older versions of samewise logged only the metric's last value
    names = [
        name
        for name in (column(monitor), key(monitor))
        if any(name in run["metrics"] for run in runs)
    ]
    params = [f"params.`{name}`" for name in varying([run["params"] for run in runs])]
    metrics = [f"metrics.`{name}`" for name in names]
    columns = [*metrics[:1], *params, *metrics[1:], "attributes.`Duration`"]
    is_lower_better = latest.get("evaluate.mode") == "min"
    return {
        "selectedColumns": columns,
        "columnOrder": [*_WIDTHS, *columns],
        "columnWidths": {**_WIDTHS, **dict.fromkeys(columns, _WIDTH)},
        "searchFilter": f"params.`choices.experiment` = '{file}'" if file else "",
        **({"orderByKey": metrics[0], "orderByAsc": is_lower_better} if metrics else {}),
    }


def varying(params: Sequence[Mapping[str, str]]) -> list[str]:
    """List the settings in which runs differ, those with the most values first."""
    counts = {
        name: len({x.get(name) for x in params})
        for name in {name for x in params for name in x}
        if not (name.startswith("choices.") or is_outside(name))
    }
    names = [name for name, count in counts.items() if count > 1]
    return sorted(names, key=lambda name: (-counts[name], name))[:_COLUMNS]


def _arrange(base: str, experiment: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Set the view of an experiment's page."""
    tags = {tag["key"]: str(tag["value"]) for tag in experiment.get("tags", [])}
    # Packed as MLflow's *Share* does, since a tag in some stores has at most 5000 characters
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    new_tags = {_KIND: "custom_model_development", **tags, _VIEW: f"deflate;{packed}"}
    for name in (_KIND, _VIEW):
        if tags.get(name) != new_tags[name]:
            _ask(
                base,
                "experiments/set-experiment-tag",
                {
                    "experiment_id": experiment["experiment_id"],
                    "key": name,
                    "value": new_tags[name],
                },
            )


def _ask(base: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{base}/api/2.0/mlflow/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        return json.load(answer)
