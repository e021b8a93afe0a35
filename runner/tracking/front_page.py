"""The page that `samewise ui` opens: runs of the experiment file trained last, the best first, with
the columns in which they differ.

MLflow keeps a view of an experiment's runs as a tag of it (`mlflow.sharedViewState.KEY`), which
`viewStateShareKey=KEY` in an address opens; `workflowType` chooses the sidebar for training over
that for language models. So it stands in the source of the pages of MLflow 3.17 and 3.18, which
tests/sweeps/test_report.py opens in a browser. Speaks HTTP to a server of ours, and imports neither
torch nor mlflow.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from samewise.runner.records import tested
from samewise.runner.tracking.views import Part, StoredRun, note, parts, view

_KIND = "mlflow.experimentKind"
_VIEW = "mlflow.sharedViewState."
_NOTE = "mlflow.note.content"
_OURS = "samewise.note"
"""SHA-256 of the description that `samewise ui` wrote: another one is the user's."""
_EARLIER = "Runs of samewise, the best "
_RUNS = 300
"""Of an experiment, the latest; more are not looked at for what differs."""
_SECONDS = 30.0


def prepare(base: str) -> str:
    """Set up the pages of all experiments with samewise runs, and return the address of the one
    with the latest run.

    Returns the list of experiments where none has such runs, MLflow is newer than tested, or the
    server answers otherwise than expected: then MLflow's pages are as they come.
    """
    if tested.is_newer("mlflow"):
        return f"{base}/#/experiments"
    try:
        found = _ask(
            base, "experiments/search", {"max_results": 200, "order_by": ["last_update_time DESC"]}
        ).get("experiments", [])
        latest = dict[str, int]()
        for experiment in found:
            runs = [
                StoredRun(one)
                for one in _ask(base, "runs/search", _query(experiment["experiment_id"])).get(
                    "runs", []
                )
            ]
            if runs := [run for run in runs if "samewise.fingerprint" in run.tags]:
                known = parts(runs)
                _arrange(base, experiment, known)
                first = known[0].address(experiment["experiment_id"])
                latest[first] = max(run.start for run in runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{base}/#/experiments"
    return (
        f"{base}/{max(latest, key=lambda page: latest[page])}"
        if latest
        else f"{base}/#/experiments"
    )


def _query(experiment: str) -> dict[str, Any]:
    return {
        "experiment_ids": [experiment],
        "max_results": _RUNS,
        "order_by": ["attributes.start_time DESC"],
    }


def _arrange(base: str, experiment: Mapping[str, Any], found: Sequence[Part]) -> None:
    """Set an experiment's description, how to read its page, its best run, and each page's view.

    What a user has set stays.
    """
    has = {tag["key"]: str(tag["value"]) for tag in experiment.get("tags", [])}
    given = {f"{_VIEW}{part.key}": _pack(view(part)) for part in found}
    if _KIND not in has:
        given[_KIND] = "custom_model_development"
    if _NOTE not in has or _sha256(has[_NOTE]) == has.get(_OURS) or has[_NOTE].startswith(_EARLIER):
        given[_NOTE] = note(experiment["experiment_id"], found)
        given[_OURS] = _sha256(given[_NOTE])
    for key, value in given.items():
        if has.get(key) != value:
            _ask(
                base,
                "experiments/set-experiment-tag",
                {"experiment_id": experiment["experiment_id"], "key": key, "value": value},
            )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _pack(state: Mapping[str, Any]) -> str:
    """Packed as by MLflow's *Share*, since a tag in some stores has at most 5000 characters."""
    return f"deflate;{base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()}"


def _ask(base: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{base}/api/2.0/mlflow/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        return json.load(answer)
