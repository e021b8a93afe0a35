"""SHA-256 of a finished run's trace and checkpoints, in its summary: any later change to them is
detected.
"""

from __future__ import annotations

from typing import Any

from samewise.runner.errors import ConfigError
from samewise.runner.records import shapes
from samewise.runner.records.checkpoint import CheckpointFolder, list_checkpoints
from samewise.runner.records.files import read_json, sha256
from samewise.runner.records.folder import RunFolder


def roots(folder: RunFolder) -> dict[str, Any]:
    """For the summary: `trace_sha256` (None without a trace) and `checkpoints_sha256`, of each
    checkpoint's state.pt by step.
    """
    states = {
        str(kept.step): digest
        for kept in list_checkpoints(folder.checkpoints)
        if (digest := _recorded_digest(kept))
    }
    return {
        "trace_sha256": sha256(folder.trace) if folder.trace.exists() else None,
        "checkpoints_sha256": states,
    }


def alterations(folder: RunFolder) -> dict[str, str]:
    """What disagrees with the summary, in words: the trace under "trace", checkpoints by step.

    Empty if the summary has no such record.
    """
    summary = read_json(folder.summary, shapes.SUMMARY) or {}
    if "trace_sha256" not in summary:
        words = (
            "summary.json was altered after the run had ended: it has no trace_sha256, and "
            "should, since it has checkpoints_sha256"
        )
        return {"trace": words} if "checkpoints_sha256" in summary else {}
    found = dict[str, str]()
    if summary["trace_sha256"] != (sha256(folder.trace) if folder.trace.exists() else None):
        found["trace"] = (
            "trace.jsonl was altered after the run had ended: its SHA-256 is not the one "
            "in summary.json"
        )
    known = summary.get("checkpoints_sha256", {})
    for kept in list_checkpoints(folder.checkpoints):
        if str(kept.step) not in known:
            found[str(kept.step)] = (
                f"{kept.path.name} was added after the run had ended: summary.json does not list it"
            )
        elif known[str(kept.step)] != _recorded_digest(kept):
            found[str(kept.step)] = (
                f"{kept.path.name} was altered after the run had ended: its SHA-256 is not "
                "the one in summary.json"
            )
    return found


def _recorded_digest(kept: CheckpointFolder) -> str | None:
    """The SHA-256 in a checkpoint's manifest, with which `checkpoint.read` compares its bytes.

    None if it cannot be read.
    """
    try:
        return (read_json(kept.path / "manifest.json", shapes.MANIFEST) or {}).get("sha256")
    except ConfigError:
        return None
