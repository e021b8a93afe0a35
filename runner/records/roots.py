"""Records the SHA-256 of a finished run's trace and checkpoints in its summary, and checks them."""

from __future__ import annotations

from typing import Any

from samewise.runner.errors import ConfigError
from samewise.runner.records import shapes
from samewise.runner.records.checkpoint import CheckpointFolder, list_checkpoints
from samewise.runner.records.files import read_json, sha256
from samewise.runner.records.folder import RunFolder


def roots(folder: RunFolder) -> dict[str, Any]:
    """Return the summary's `trace_sha256` and `checkpoints_sha256`.

    The first is None without a trace; the second has the digest of each checkpoint's state.pt by
    step.
    """
    states = {
        str(checkpoint.step): digest
        for checkpoint in list_checkpoints(folder.checkpoints)
        if (digest := _recorded_digest(checkpoint))
    }
    return {
        "trace_sha256": sha256(folder.trace) if folder.trace.exists() else None,
        "checkpoints_sha256": states,
    }


def alterations(folder: RunFolder) -> dict[str, str]:
    """Describe each file that disagrees with the summary: "trace", or a checkpoint's step.

    Empty if the summary has no such digests.
    """
    summary = read_json(folder.summary, shapes.SUMMARY) or {}
    if "trace_sha256" not in summary:
        message = (
            "summary.json was altered after the run had ended: it has checkpoints_sha256, but "
            "no trace_sha256"
        )
        return {"trace": message} if "checkpoints_sha256" in summary else {}
    messages = dict[str, str]()
    if summary["trace_sha256"] != (sha256(folder.trace) if folder.trace.exists() else None):
        messages["trace"] = (
            "trace.jsonl was altered after the run had ended: its SHA-256 is not the one "
            "in summary.json"
        )
    digests = summary.get("checkpoints_sha256", {})
    for checkpoint in list_checkpoints(folder.checkpoints):
        if str(checkpoint.step) not in digests:
            messages[str(checkpoint.step)] = (
                f"{checkpoint.path.name} was added after the run had ended: summary.json "
                "does not list it"
            )
        elif digests[str(checkpoint.step)] != _recorded_digest(checkpoint):
            messages[str(checkpoint.step)] = (
                f"{checkpoint.path.name} was altered after the run had ended: its SHA-256 is not "
                "the one in summary.json"
            )
    return messages


def _recorded_digest(checkpoint: CheckpointFolder) -> str | None:
    """Return the SHA-256 in a checkpoint's manifest; None if it cannot be read.

    `checkpoint.read` compares the bytes of state.pt with it.
    """
    try:
        return (read_json(checkpoint.path / "manifest.json", shapes.MANIFEST) or {}).get("sha256")
    except ConfigError:
        return None
