"""Build addresses of pages in the MLflow UI that compare a sweep's runs.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from samewise.runner.records import shapes
from samewise.runner.records.files import read_mapping
from samewise.runner.records.summary import ui_command
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.sweeps.results import PointResult
from samewise.runner.sweeps.settings import rank_settings
from samewise.runner.tracking.best import column
from samewise.runner.tracking.describing import key
from samewise.runner.tracking.views import FOR_TRAINING

# Some browsers cut off longer addresses
_MAX_RUNS = 100
"""Number of runs on the compare page; the best of them."""
_LOCAL = "http://127.0.0.1:5000"


@dataclass(frozen=True)
class Pages:
    """Addresses in the MLflow UI.

    Args:
        compare: The runs side by side: parallel coordinates, scatter, box and contour plots, params
            and metrics.
        table: The sweep's runs in the experiment's table, with the charts at a click.
        opens: The command that serves the pages; "" if a server does already.
    """

    compare: str
    table: str
    opens: str = ""


def pages(folder: SweepFolder, results: Sequence[PointResult]) -> Pages | None:
    """Return the addresses; None if no run is in MLflow yet."""
    runs, experiments = list[str](), list[str]()
    for setting in rank_settings(results):
        for result in setting:
            ids = _mlflow_ids(result)
            if ids is not None and ids[0] not in runs and len(runs) < _MAX_RUNS:
                runs.append(ids[0])
                experiments += [ids[1]] if ids[1] not in experiments else []
    if not runs:
        return None
    uri = str(folder.facts["tracking"]["uri"])
    remote = uri.startswith(("http://", "https://"))
    base = uri.rstrip("/") if remote else _LOCAL
    query = f"runs={quote(_compact(runs))}&experiments={quote(_compact(experiments))}"
    compare = f"{base}/#/compare-runs?{query}&{FOR_TRAINING}"
    # A run that was trained alone or by another sweep has no tag, or the other's
    reused = any(result.tries == 0 for result in results)
    names = ", ".join(f"'{run}'" for run in runs)
    filter_text = quote(
        f"attributes.run_id IN ({names})" if reused else f"tags.sweep = '{folder.id}'"
    )
    result = results[0]
    name = (
        column(result.objective)
        if result.objective == result.point.monitor
        else key(result.objective.removeprefix("final/"))
    )
    ascending = str(result.mode == "min").lower()
    order = f"orderByKey={quote(f'metrics.`{name}`', safe='')}&orderByAsc={ascending}"
    query = f"searchFilter={filter_text}&{order}"
    table = f"{base}/#/experiments/{experiments[0]}/runs?{query}&{FOR_TRAINING}"
    return Pages(compare, table, "" if remote else ui_command(uri, Path(folder.facts["run_root"])))


def _mlflow_ids(result: PointResult) -> tuple[str, str] | None:
    """Return the ids of a run and its experiment in MLflow."""
    tracking = read_mapping(result.point.run.tracking, shapes.TRACKING)
    return (
        (str(tracking["run_id"]), str(tracking["experiment_id"]))
        if tracking.get("run_id") and tracking.get("experiment_id") is not None
        else None
    )


def _compact(values: Sequence[str]) -> str:
    return json.dumps(list(values), separators=(",", ":"))
