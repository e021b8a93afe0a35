"""List the runs of an MLflow store as those of a run root are listed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.config.fingerprint import is_outside
from samewise.runner.errors import Problem
from samewise.runner.runs.listing import ListedRun, as_lines, differing
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
_IGNORED_METRICS = ("system/", "speed/", "train/", PREFIX)
_OWN_TAGS = ("samewise.", "mlflow.", "env.")
_PAGE = 200


def list_stored(uri: str) -> tuple[list[ListedRun], dict[str, dict[str, Any]]]:
    """Return all of samewise's runs in a store, the last changed at the end. Writes nothing.

    Args:
        uri: Address of the store, which the user has named: MLflow's tokens are sent there.

    Returns:
        The runs, and the settings that affect the result and differ between them, by folder and
        path of the config.

    Raises:
        ConfigError: The address is not a store's, or the store does not answer.
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
            stored_runs = list(_runs(client))
            own_runs = [run for run in stored_runs if "samewise.fingerprint" in run.data.tags]
            histories = _histories(client, checked, own_runs)
            listed = [_list_run(run, histories[run.info.run_id]) for run in own_runs]
    if len(own_runs) < len(stored_runs):
        print(
            f"{len(stored_runs) - len(own_runs)} runs in the store are not samewise's and are "
            "left out",
            file=sys.stderr,
        )
    configs = {
        entry.folder: as_lines(
            (path, value)
            for path, value in run.data.params.items()
            if not path.startswith("choices.") and not is_outside(path)
        )
        for entry, run in zip(listed, own_runs, strict=True)
    }
    return sorted(listed, key=lambda run: run.changed), differing(configs)


def _runs(client: MlflowClient) -> Iterator[Run]:
    """Yield all runs of a store."""
    for experiment in client.search_experiments():
        token = None
        while token is None or token:
            page = client.search_runs(
                [experiment.experiment_id], max_results=_PAGE, page_token=token
            )
            yield from page
            token = page.token or ""


def _histories(
    client: MlflowClient, uri: str, runs: Sequence[Run]
) -> dict[str, dict[str, dict[int, float]]]:
    """Return the values of evaluations, by the run's id, metric and step."""
    from samewise.runner.tracking.store import database, logged_values

    histories = {
        run.info.run_id: {
            name: dict[int, float]()
            for name in run.data.metrics
            if not name.startswith(_IGNORED_METRICS)
        }
        for run in runs
    }
    if (engine := database(uri)) is None:
        for run_id, history in histories.items():
            for name, values in history.items():
                values |= {x.step: x.value for x in client.get_metric_history(run_id, name)}
        return histories
    ids = list(histories)
    for start in range(0, len(ids), _PAGE):
        page = ids[start : start + _PAGE]
        names = list({name for run_id in page for name in histories[run_id]})
        for run_id, name, step, value in logged_values(engine, page, names):
            histories[run_id].setdefault(name, {})[step] = value
    return histories


def _list_run(run: Run, history: Mapping[str, Mapping[int, float]]) -> ListedRun:
    """Return the list's entry for a stored run."""
    tags, params, info = run.data.tags, run.data.params, run.info
    folder = Path(tags.get("samewise.folder") or info.run_id)
    name, fingerprint = folder.parent.name or str(info.run_name), tags["samewise.fingerprint"][:12]
    monitor, label = (
        key(params["evaluate.monitor"]) if "evaluate.monitor" in params else "",
        tags.get("samewise.label", str(info.run_name or "")),
    )
    metrics, best, step = _metrics(run, history, monitor, mode=params.get("evaluate.mode", "max"))
    return ListedRun(
        name=tags.get("samewise.name", name),
        run=fingerprint,
        # `describing.run_name` appends the experiment's name; older versions sent only that
        label=label.removesuffix(f" ({name})")
        if label.endswith(f" ({name})") or "samewise.label" in tags
        else "",
        code=tags.get("samewise.code", ""),
        state=_STATES.get(info.status, State.interrupted),
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
        seconds=(info.end_time - info.start_time) / 1000
        if info.end_time is not None and info.status != "RUNNING"
        else math.nan,
        changed=(info.end_time or info.start_time) / 1000,
        reason="",
        folder=str(folder),
        tags={name: value for name, value in tags.items() if not name.startswith(_OWN_TAGS)},
    )


def _metrics(
    run: Run, values: Mapping[str, Mapping[int, float]], monitor: str, *, mode: str
) -> tuple[dict[str, float], float, int]:
    """Return the evaluation metrics at the best step, the best value, and the last logged step."""
    monitored = {
        step: value for step, value in values.get(monitor, {}).items() if not math.isnan(value)
    }
    last_step = max(
        (x.step for x in run.data.to_proto().metrics if not x.key.startswith("system/")),
        default=0,
    )
    if not monitored:
        return (
            {name: history[max(history)] for name, history in values.items() if history},
            math.nan,
            last_step,
        )
    # Of equal values the first step counts, as in training
    best = (min if mode == "min" else max)(sorted(monitored), key=monitored.__getitem__)
    return (
        {name: history[best] for name, history in values.items() if best in history},
        monitored[best],
        last_step,
    )
