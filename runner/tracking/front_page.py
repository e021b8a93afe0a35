"""Prepares the page that `samewise ui` opens: the latest experiment's runs, the best first.

MLflow keeps a view of an experiment's runs as a tag of it (`mlflow.sharedViewState.KEY`), which
`viewStateShareKey=KEY` in an address opens; `workflowType` chooses the sidebar for training instead
of that for language models. Both are as in the source of the pages of MLflow 3.17 and 3.18, which
tests/sweeps/test_report.py opens in a browser. Speaks HTTP to samewise's own server, and imports
neither torch nor mlflow.
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
_NOTE_DIGEST = "samewise.note"
"""SHA-256 of the description that `samewise ui` wrote; any other description is the user's."""
_EARLIER = "Runs of samewise, the best "
_RUNS = 300
"""Maximum number of an experiment's latest runs that are compared."""
_SECONDS = 30.0


def prepare(base: str) -> str:
    """Set up the pages of all experiments with samewise runs; return the address of the latest.

    Returns the list of experiments if there are no such runs, MLflow is newer than tested, or the
    server's answer is unexpected: then MLflow's pages stay as they are.
    """
    if tested.is_newer("mlflow"):
        return f"{base}/#/experiments"
    try:
        experiments = _ask(
            base, "experiments/search", {"max_results": 200, "order_by": ["last_update_time DESC"]}
        ).get("experiments", [])
        latest = dict[str, int]()
        for experiment in experiments:
            entries = _ask(base, "runs/search", _query(experiment["experiment_id"])).get("runs", [])
            runs = [run for run in map(StoredRun, entries) if "samewise.fingerprint" in run.tags]
            if runs:
                run_parts = parts(runs)
                _arrange(base, experiment, run_parts)
                page = run_parts[0].address(experiment["experiment_id"])
                latest[page] = max(run.start for run in runs)
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


def _arrange(base: str, experiment: Mapping[str, Any], run_parts: Sequence[Part]) -> None:
    """Set an experiment's description and each page's view; do not replace a user's own."""
    tags = {tag["key"]: str(tag["value"]) for tag in experiment.get("tags", [])}
    new_tags = {f"{_VIEW}{part.key}": _pack(view(part)) for part in run_parts}
    if _KIND not in tags:
        new_tags[_KIND] = "custom_model_development"
    if (
        _NOTE not in tags
        or _sha256(tags[_NOTE]) == tags.get(_NOTE_DIGEST)
        # Earlier versions wrote descriptions without a digest
        or tags[_NOTE].startswith(_EARLIER)
    ):
        new_tags[_NOTE] = note(experiment["experiment_id"], run_parts)
        new_tags[_NOTE_DIGEST] = _sha256(new_tags[_NOTE])
    for key, value in new_tags.items():
        if tags.get(key) != value:
            _ask(
                base,
                "experiments/set-experiment-tag",
                {"experiment_id": experiment["experiment_id"], "key": key, "value": value},
            )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _pack(state: Mapping[str, Any]) -> str:
    """Return a view's state as MLflow's *Share* packs it."""
    # Packed, since a tag in some stores has at most 5000 characters
    return f"deflate;{base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()}"


def _ask(base: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{base}/api/2.0/mlflow/{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        return json.load(answer)
