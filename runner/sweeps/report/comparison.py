"""Addresses of pages in the MLflow UI that compare a sweep's runs.

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

_MOST = 100
"""Runs on the compare page; the best of them. A longer address is cut off by some browsers."""
_LOCAL = "http://127.0.0.1:5000"


@dataclass(frozen=True)
class Pages:
    """Addresses in the MLflow UI.

    Args:
        compare: The runs side by side: parallel coordinates, scatter, box and contour plots, params
            and metrics.
        table: The experiment's runs of this sweep: the table, and the charts at a click.
        opens: The command that serves them; empty if a server does already.
    """

    compare: str
    table: str
    opens: str = ""


def pages(folder: SweepFolder, found: Sequence[PointResult]) -> Pages | None:
    """The addresses; None if no run is in MLflow yet."""
    runs, experiments = list[str](), list[str]()
    for setting in rank_settings(found):
        for one in setting:
            known = _mlflow_ids(one)
            if known is not None and known[0] not in runs and len(runs) < _MOST:
                runs.append(known[0])
                experiments += [known[1]] if known[1] not in experiments else []
    if not runs:
        return None
    uri = str(folder.facts["tracking"]["uri"])
    remote = uri.startswith(("http://", "https://"))
    base = uri.rstrip("/") if remote else _LOCAL
    compare = f"{base}/#/compare-runs?runs={quote(_compact(runs))}&experiments={quote(_compact(experiments))}&{FOR_TRAINING}"
    # Trained alone or by another sweep, whose tag it has
    reused = any(one.tries == 0 for one in found)
    names = ", ".join(f"'{run}'" for run in runs)
    wanted = quote(f"attributes.run_id IN ({names})" if reused else f"tags.sweep = '{folder.id}'")
    one = found[0]
    name = (
        column(one.objective)
        if one.objective == one.point.monitor
        else key(one.objective.removeprefix("final/"))
    )
    order = f"orderByKey={quote(f'metrics.`{name}`', safe='')}&orderByAsc={str(one.mode == 'min').lower()}"
    table = (
        f"{base}/#/experiments/{experiments[0]}/runs?searchFilter={wanted}&{order}&{FOR_TRAINING}"
    )
    return Pages(compare, table, "" if remote else ui_command(uri, Path(folder.facts["run_root"])))


def _mlflow_ids(one: PointResult) -> tuple[str, str] | None:
    """The ids of a run and its experiment in MLflow."""
    known = read_mapping(one.point.run.tracking, shapes.TRACKING)
    return (
        (str(known["run_id"]), str(known["experiment_id"]))
        if known.get("run_id") and known.get("experiment_id") is not None
        else None
    )


def _compact(values: Sequence[str]) -> str:
    return json.dumps(list(values), separators=(",", ":"))
