"""Audits a run, and describes the findings and the steps that were not audited."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.run import Run
from samewise.runner.verify.audit import Audit, Segment, begin, choose, segments
from samewise.runner.verify.divergence import Divergence
from samewise.runner.verify.rerun_comparison import Comparison
from samewise.runner.verify.second_training import read_logged


def audit(
    again: Run,
    comparison: Comparison,
    folder: RunFolder,
    divergences: list[Divergence],
    lines: list[str],
    *,
    count: int,
    seed: int | None,
) -> dict[str, Any]:
    """Repeat some of a run's segments.

    Args:
        again: A new run of the recorded run's config.
        comparison: One of its callbacks.
        folder: The recorded run's folder.
        divergences: Earlier findings, whose segments are repeated too; findings are added.
        lines: The lines to print, to which findings are added.
        count: The number of segments to draw at random; 0: all.
        seed: The seed of the draw; None: a new one.

    Returns:
        The audited steps, and those left out.
    """
    # Before `segments`, as it restores the step at which a continued run began
    start = begin(again)
    parts = segments(
        folder, max(comparison.steps, default=0), first=None if start is None else again.step
    )
    if not parts:
        why = "it has neither an intact checkpoint nor a trace from its first step"
        hint = (
            why
            if again.total_steps
            else "it has no steps; without --audit, its weights and results are compared"
        )
        raise ConfigError(
            Problem(str(folder.path), "no part of this run can be audited", hint=hint)
        )
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    auditing = Audit(again, folder, comparison, read_logged(folder), start or {})
    done = choose(parts, count or None, seed, divergences)
    findings = [divergence for part in done if (divergence := auditing.replay(part))]
    findings += auditing.judge_summary(read_json(folder.summary, shapes.SUMMARY) or {})
    divergences += findings
    steps, last = sum(part.end - part.start for part in done), parts[-1].end
    lines += map(str, findings)
    drawn = f" (drawn with --audit-seed {seed})" if count else ""
    lines.append(
        f"audited: {len(done)} of {len(parts)} segments, {steps} of {last} steps{drawn}"
        + ("" if findings else ": the same bits")
    )
    lines += _describe_unaudited(
        parts,
        done,
        comparison,
        last,
        continued=bool(again.config.resume_from and start is not None),
    )
    if start is None:
        lines.append(
            "cannot be verified: the fingerprint of config.yaml; the checkpoint "
            f"{again.config.resume_from} (resume_from) is missing or does not fit"
        )
    if folder.summary.exists():
        lines.append(
            "not compared by an audit: files in artifacts/, and metrics that were removed; "
            "`samewise verify` without --audit compares them"
        )
    unaudited = [[part.start + 1, part.end] for part in parts if part not in done]
    return {
        "seed": seed,
        "segments": len(parts),
        "replayed": [[part.start + 1, part.end] for part in done],
        "steps": steps,
        "left": unaudited,
    }


def _describe_unaudited(
    parts: Sequence[Segment],
    done: Sequence[Segment],
    comparison: Comparison,
    last: int,
    *,
    continued: bool,
) -> list[str]:
    """Describe the steps that were not audited or cannot be."""
    lines, unaudited = list[str](), [part for part in parts if part not in done]
    if unaudited:
        lines.append(
            "not audited: "
            + ", ".join(f"steps {start + 1} to {end}" for start, end in _join_neighbours(unaudited))
        )
    if parts[0].start:
        why = (
            "which belong to the run that it continues"
            if continued
            else "since their starting state is not kept here"
        )
        lines.append(f"cannot be audited: steps 1 to {parts[0].start}, {why}")
    for part in parts:
        if 4 * (part.end - part.start) > last:
            message = (
                f"no checkpoint is kept between steps {part.start} and {part.end}, so the "
                "steps between can only be audited together"
            )
            lines.append(
                f"{message}; checkpoint.every_steps and checkpoint.keep_every_steps keep more"
            )
    if bare := sum(
        part.end - part.start - sum(part.start < step <= part.end for step in comparison.steps)
        for part in done
    ):
        lines.append(
            f"{bare} steps have no line in the trace, and were audited only by the "
            "checkpoints that they led to"
        )
    return lines


def _join_neighbours(parts: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    """Merge adjacent segments into (start, end)."""
    start = end = parts[0].start
    for part in parts:
        if part.start != end:
            yield start, end
            start = part.start
        end = part.end
    yield start, end
