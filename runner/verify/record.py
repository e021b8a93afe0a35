"""A run's record as it is verified, and what it lacks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samewise.runner.config.compose import Composed
from samewise.runner.records import kept_sources, shapes, sources
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.verify import record_comparison
from samewise.runner.verify.request import Request
from samewise.runner.verify.rerun_comparison import Comparison


@dataclass(frozen=True)
class Record:
    """A run's record, and what is known of it before it is repeated.

    Args:
        folder: The run's.
        original: Its config, without overrides.
        unlike: Path and two values of each setting that overrides change.
        environment: As recorded; empty if the record is missing.
    """

    folder: RunFolder
    original: Composed
    unlike: Sequence[tuple[str, Any, Any]]
    environment: dict[str, Any]

    @property
    def settings(self) -> list[str]:
        """The paths of the settings that overrides change."""
        return [path for path, _, _ in self.unlike]


def changed_code(folder: RunFolder) -> list[str]:
    """Describe how the user's code differs from the run's."""
    changed = [f"the code differs: {line}" for line in sources.list_changes(folder.sources)]
    if changed and any(kept_sources.texts_of(folder.sources).values()):
        command = f"samewise diff {shlex.quote(str(folder.path))}"
        changed.append(f"`{command}` shows the lines of code that differ")
    return changed


def unknown(
    request: Request,
    record: Record,
    comparison: Comparison,
    altered: Sequence[str],
) -> list[str]:
    """Describe what the record lacks, so that it cannot be verified."""
    folder = record.folder
    lacking = [f"{folder.path}: {comparison.missing}"] if comparison.missing else []
    if not folder.metrics.exists() and request.is_local(folder):
        lacking.append(f"{folder.metrics}: is missing: what the run logged was not compared")
    if not record.environment:
        lacking.append(
            f"{folder.environment}: is missing: whether another environment explains a "
            "difference cannot be known"
        )
    summary = read_json(folder.summary, shapes.SUMMARY)
    if summary is not None and "trace_sha256" not in summary and not altered:
        lacking.append(
            "cannot be verified: whether trace and checkpoints were altered after the "
            "run had ended; summary.json has no SHA-256 of them"
        )
    if hidden := record_comparison.hidden_settings(record.original):
        lacking.append(
            "cannot be verified: the fingerprint of config.yaml, in which "
            f"{', '.join(hidden)} is hidden"
        )
    return lacking
