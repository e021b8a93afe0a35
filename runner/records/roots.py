"""What a finished run's summary says of its trace and its checkpoints, by SHA-256: what either was altered to afterwards does not agree with it."""

from __future__ import annotations

from typing import Any

from samewise.runner.errors import CheckpointError, ConfigError, DamagedFile
from samewise.runner.records import shapes
from samewise.runner.records.checkpoint import Kept, list_checkpoints
from samewise.runner.records.files import read_json, sha256
from samewise.runner.records.folder import RunFolder


def roots(folder: RunFolder) -> dict[str, Any]:
    """For the summary: `trace_sha256`, None without a trace; `checkpoints_sha256`, of each checkpoint's state.pt by its step."""
    states = {str(kept.step): digest for kept in list_checkpoints(folder.checkpoints) if (digest := _written(kept))}
    return {"trace_sha256": sha256(folder.trace) if folder.trace.exists() else None, "checkpoints_sha256": states}


def alterations(folder: RunFolder) -> dict[str, str]:
    """What is not as the summary has it, in words: of the trace under "trace", of checkpoints by their step. Empty for a run without such a summary."""
    summary = read_json(folder.summary, shapes.SUMMARY) or {}
    if "trace_sha256" not in summary:
        return {}
    found = dict[str, str]()
    if summary["trace_sha256"] != (sha256(folder.trace) if folder.trace.exists() else None):
        found["trace"] = "trace.jsonl was altered after the run had ended: its SHA-256 is not the one in summary.json"
    known = summary.get("checkpoints_sha256", {})
    for kept in list_checkpoints(folder.checkpoints):
        if str(kept.step) not in known:
            found[str(kept.step)] = f"{kept.path.name} was added after the run had ended: summary.json does not list it"
        elif known[str(kept.step)] != _written(kept):
            found[str(kept.step)] = f"{kept.path.name} was altered after the run had ended: its SHA-256 is not the one in summary.json"
    return found


def _written(kept: Kept) -> str | None:
    """The SHA-256 that a checkpoint's manifest has, which `checkpoint.read` holds its bytes against; None where it cannot be read."""
    try:
        return (read_json(kept.path / "manifest.json", shapes.MANIFEST) or {}).get("sha256")
    except (CheckpointError, ConfigError, DamagedFile):
        return None
