"""Lists the runs of an MLflow store as those of a run root are listed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.config.fingerprint import is_outside
from samewise.runner.errors import Problem
from samewise.runner.runs.listing import ListedRun
from samewise.runner.sweeps.results import State
from samewise.runner.tracking.address import check_uri, remove_password, require_there
from samewise.runner.tracking.best import PREFIX, column
from samewise.runner.tracking.describing import key
from samewise.runner.tracking.sender import quiet_mlflow

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_STATES = {
    "FINISHED": State.finished,
    "FAILED": State.failed,
    "KILLED": State.interrupted,
    "RUNNING": State.running,
    "SCHEDULED": State.waiting,
}
_LEFT_OUT = ("system/", "speed/", "train/", PREFIX)
_PAGE = 200


def list_stored(uri: str) -> tuple[list[ListedRun], dict[str, dict[str, str]]]:
    """All of samewise's runs in a store, the last changed at the end.

    Writes nothing. ConfigError if it is not the address of a store, or does not answer.

    Returns the runs; and what decides the result and is not the same in all of them: by folder, the
    values by path of the config.

    Args:
        uri: The store's, which the user has named: MLflow's tokens are sent there.
    """
    checked = check_uri(uri, path="--uri")
    require_there(checked, path="--uri")
    with quiet_mlflow():
        from samewise.runner.tracking.store import open_reader

        with open_reader(
            checked,
            lambda reason: Problem(
                "--uri", f"MLflow cannot read it: {reason}", remove_password(uri), "an MLflow store"
            ),
        ) as client:
            found = list(_runs(client))
            mine = [one for one in found if "samewise.fingerprint" in one.data.tags]
            listed = [_list_run(client, one) for one in mine]
    if len(mine) < len(found):
        print(
            f"{len(found) - len(mine)} runs in the store are not samewise's, and are left out",
            file=sys.stderr,
        )
    return sorted(listed, key=lambda one: one.changed), _varying(
        dict(zip((one.folder for one in listed), (one.data.params for one in mine), strict=True))
    )


def _runs(client: MlflowClient) -> Iterator[Run]:
    for experiment in client.search_experiments():
        token = None
        while token is None or token:
            page = client.search_runs(
                [experiment.experiment_id], max_results=_PAGE, page_token=token
            )
            yield from page
            token = page.token or ""


def _list_run(client: MlflowClient, run: Run) -> ListedRun:
    tags, params, told = run.data.tags, run.data.params, run.info
    folder = Path(tags.get("samewise.folder") or told.run_id)
    name, fingerprint = folder.parent.name or str(told.run_name), tags["samewise.fingerprint"][:12]
    monitor, label = (
        key(params["evaluate.monitor"]) if "evaluate.monitor" in params else "",
        str(told.run_name or ""),
    )
    metrics, best, step = _metrics(client, run, monitor, mode=params.get("evaluate.mode", "max"))
    return ListedRun(
        name=name,
        run=fingerprint,
        label=label.removesuffix(f" ({name})") if label.endswith(f" ({name})") else "",
        code=tags.get("samewise.code", ""),
        state=_STATES.get(told.status, State.interrupted),
        step=step,
        steps=int(tags.get("env.total_steps") or 0),
        monitor=monitor,
        value=best,
        also={
            name.removeprefix(PREFIX): value
            for name, value in run.data.metrics.items()
            if name.startswith(PREFIX) and name != column(monitor)
        },
        metrics=metrics,
        seconds=(told.end_time - told.start_time) / 1000
        if told.end_time is not None and told.status != "RUNNING"
        else math.nan,
        changed=(told.end_time or told.start_time) / 1000,
        reason="",
        folder=str(folder),
    )


def _metrics(
    client: MlflowClient, run: Run, monitor: str, *, mode: str
) -> tuple[dict[str, float], float, int]:
    """The evaluation metrics at the best step, the best value, and the last logged step."""
    names = [name for name in run.data.metrics if not name.startswith(_LEFT_OUT)]
    values = {
        name: {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}
        for name in names
    }
    monitored = {
        step: value for step, value in values.get(monitor, {}).items() if not math.isnan(value)
    }
    last = max(
        (one.step for one in run.data.to_proto().metrics if not one.key.startswith("system/")),
        default=0,
    )
    if not monitored:
        return (
            {name: by_step[max(by_step)] for name, by_step in values.items() if by_step},
            math.nan,
            last,
        )
    best = (min if mode == "min" else max)(sorted(monitored), key=monitored.__getitem__)
    return (
        {name: by_step[best] for name, by_step in values.items() if best in by_step},
        monitored[best],
        last,
    )


def _varying(params: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    paths = dict.fromkeys(
        path
        for known in params.values()
        for path in known
        if not path.startswith("choices.") and not is_outside(path)
    )
    kept: Sequence[Any] = [
        path for path in paths if len({known.get(path, "-") for known in params.values()}) > 1
    ]
    return {
        folder: {path: known.get(path, "-") for path in kept} for folder, known in params.items()
    }
