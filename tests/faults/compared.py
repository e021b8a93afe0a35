"""Comparisons of a disturbed training: its checkpoints, its results, and what MLflow holds."""

import contextlib
import hashlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from struck import Wrong

TIMED = ("speed/", "system/")
DERIVED = ("best/",)
"""Metrics that MLflow holds in addition to the journal's, derived from those."""


def require_kept(root: Path, seen: dict[str, str]) -> None:
    """Require that no intact checkpoint in `seen` was lost or has changed; add the present ones to it."""
    for name, digest in seen.items():
        if whole(root / name) != digest:
            raise Wrong(f"{root / name} was whole, with {digest}, and is now {whole(root / name)}")
    for folder in root.glob("*/*/checkpoints/step-*"):
        digest = None if folder.is_symlink() else whole(folder)
        if digest:
            seen[str(folder.relative_to(root))] = digest


def whole(folder: Path) -> str | None:
    """The digest of a checkpoint if it matches its manifest."""
    try:
        digest = json.loads((folder / "manifest.json").read_text())["sha256"]
        return digest if hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest() == digest else None
    except (OSError, ValueError, KeyError):
        return None


def results_in(root: Path) -> dict[str, dict[str, Any]]:
    """The results of the runs below a run root, by name and fingerprint."""
    found = sorted(path.parent for path in root.glob("*/*/config.yaml") if "mlartifacts" not in path.parts)
    return {str(folder.relative_to(root)): result_of(folder) for folder in found}


def result_of(folder: Path) -> dict[str, Any]:
    """What two trainings of one experiment must have in common."""
    from samewise.runner.tracking.journal import read_entries

    summary = json.loads((folder / "summary.json").read_text())
    entries = [entry for entry, _ in read_entries(folder / "metrics.jsonl")]
    journal = sorted((name, entry.step, value) for entry in entries for name, value in entry.metrics.items() if not name.startswith(TIMED))
    kept = sorted(path.name for path in (folder / "checkpoints").glob("step-*") if whole(path))
    results = {name: summary[name] for name in ("weights_sha256", "metrics", "steps")}
    return {**results, "trace": (folder / "trace.jsonl").read_text().splitlines()[1:], "journal": journal, "checkpoints": kept}


def require_in_store(store: Path, experiment: str, journals: list[Any]) -> None:
    """Require that an MLflow store holds what the journals of an experiment's runs hold, each value once."""
    with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=60)) as opened:
        query = "SELECT run_uuid, status FROM runs JOIN experiments USING (experiment_id) WHERE experiments.name = ?"
        runs = opened.execute(query, (experiment,)).fetchall()
        rows = [opened.execute("SELECT key, step, value FROM metrics WHERE run_uuid = ?", (run[0],)).fetchall() for run in runs]
    if [run[1] for run in runs] != ["FINISHED"] * len(journals):
        raise Wrong(f"MLflow has {runs} of {experiment}")
    sent = sorted(sorted(row for row in of_run if not row[0].startswith((*TIMED, *DERIVED))) for of_run in rows)
    for had, wanted in zip(sent, sorted([tuple(row) for row in journal] for journal in journals), strict=True):
        if had != wanted:
            missing, more = sorted(set(wanted) - set(had)), sorted(set(had) - set(wanted))
            raise Wrong(f"MLflow's metrics differ: missing {missing[:5]}, more {more[:5]}, {len(had)} instead of {len(wanted)}")
