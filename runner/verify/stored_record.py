"""Compares what an MLflow store keeps of a run with the run's own record from that store."""

from __future__ import annotations

import math

from omegaconf import OmegaConf

from samewise.runner.config.fingerprint import is_outside
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.secrets import redact_values
from samewise.runner.tracking import describing
from samewise.runner.tracking.best import PREFIX

STORED = "stored.json"
"""In a run's folder from a store: its last metrics and params, as the store's own pages show them.
"""


def store_contradictions(folder: RunFolder) -> list[str]:
    """Where a store has other metrics or params than the summary and config that it keeps of the
    same run; empty for a run from elsewhere.
    """
    stored = read_json(folder.path / STORED, {"metrics": shapes.NUMBERS, "params": shapes.TEXTS})
    if not stored:
        return []
    summary = (read_json(folder.summary, shapes.SUMMARY) or {}).get(
        "metrics", {"final": {}, "best": {}, "monitor": ""}
    )
    monitor = summary["monitor"]
    measured = {
        **summary["final"],
        **({f"{PREFIX}{monitor}": summary["best"][monitor]} if monitor in summary["best"] else {}),
    }
    known = {name: float(value) for name, value in measured.items() if math.isfinite(value)}
    there = {
        name: stored["metrics"].get(
            describing.apart(name), stored["metrics"].get(describing.key(name), value)
        )
        for name, value in known.items()
    }
    found = [
        f"the store has {there[name]!r} for {name}, and its summary.json {value!r}"
        for name, value in known.items()
        if repr(there[name]) != repr(value)
    ]
    params = describing.params(redact_values(OmegaConf.to_container(OmegaConf.load(folder.config))))
    # It keeps the first of the others
    values = {
        name: (stored["params"].get(name, value), value)
        for name, value in params.items()
        if not is_outside(name)
    }
    return found + [
        f"the store has {one!r} for the parameter {name}, and its config.yaml {two!r}"
        for name, (one, two) in values.items()
        if one != two
    ]
