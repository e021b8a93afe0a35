"""Reads traces: whole, for comparison, or only the lines that lead to a run's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from samewise.runner.records import shapes
from samewise.runner.records.digest import ALGORITHMS, XXH3, combine
from samewise.runner.records.files import (
    damaged_file,
    parse_json,
    read_json,
    read_lines,
    read_text,
    require_shape,
)
from samewise.runner.records.folder import RunFolder


def read_trace(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return a trace's head, and its lines by step.

    A missing file is an empty trace; an incomplete last line is left out.

    Raises:
        DamagedFile: A line is not as it was written, so that a comparison would mean nothing.
    """
    head, lines, previous = dict[str, Any](), dict[int, dict[str, Any]](), None
    for number, text in read_lines(path):
        if not text.endswith(b"\n"):
            break
        line = _require_line(path, number, text)
        if "step" not in line:
            algorithm_of(path, head := line)
            continue
        step = line["step"]
        # The chain before the first line is unknown if the trace begins later
        chain = 0 if step == 1 else previous
        if chain is not None and not _follows(line, chain):
            raise damaged_file(
                path,
                f"line {number} does not follow from the one before "
                f"it{f' (steps {max(lines)} and {step})' if lines else ''}",
            )
        previous = int(line["chain"], 16)
        lines[step] = line
    return head, lines


def read_trace_of(folder: RunFolder) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the head and the lines of a run's trace.

    Raises:
        DamagedFile: The trace is damaged, empty, or shorter than the summary says.
    """
    head, lines = read_trace(folder.trace)
    summary = read_json(folder.summary, shapes.SUMMARY) or {}
    steps = int(summary.get("steps", 0))
    if not head and folder.trace.exists() and steps:
        raise damaged_file(folder.trace, "it is empty")
    every = _interval(folder, lines)
    last = steps - steps % every if lines and every else 0
    if lines and max(lines) < last:
        raise damaged_file(folder.trace, f"it ends at step {max(lines)}, but the run took {steps}")
    return head, lines


def _interval(folder: RunFolder, lines: Collection[int]) -> int:
    """Return the steps between a trace's last lines, by the run's config; 0 without lines."""
    # By the config and not by the lines, since a resumed run may have another interval
    match = re.search(
        r"^trace:\n(?:  .*\n)*?  every_steps: (\d+)$", read_text(folder.config) or "", re.MULTILINE
    )
    return int(match[1]) if match else min(lines, default=0)


def missing_start(lines: Mapping[int, Any]) -> str:
    """Return a sentence if a trace lacks its first steps, otherwise ""."""
    first, second = [*sorted(lines), 0, 0][:2]
    return (
        f"its trace begins at step {first}: the steps before were not compared"
        if second and first != second - first
        else ""
    )


def _require_line(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = parse_json(text)
    except ValueError as error:
        raise damaged_file(path, f"line {number}: {error}") from None
    return require_shape(
        path, line, shapes.TRACE_HEAD if number == 1 else shapes.TRACE_LINE, f"line {number}"
    )


def algorithm_of(path: Path, head: Mapping[str, Any]) -> str:
    """Return the digest algorithm of a trace; raise DamagedFile if it is unknown."""
    name = head.get("algorithm", XXH3)
    if name not in ALGORITHMS:
        raise damaged_file(
            path,
            f"its digests are made by {name!r}, which this version of samewise does not support",
        )
    return name


def lines_before(path: Path, steps: Collection[int]) -> dict[int, dict[str, Any]]:
    """Return for each step, in order, the last readable line of a trace up to it.

    Without such a line it is the first one after the step, or an empty one.
    """
    by_step, pending, last = dict[int, dict[str, Any]](), sorted(steps), dict[str, Any]()
    for line in (
        line for _, text in read_lines(path) if (line := parse_line(text)) and "step" in line
    ):
        while pending and pending[0] < line["step"]:
            by_step[pending.pop(0)] = last or line
        last = line
    return by_step | dict.fromkeys(pending, last)


def leads_to(line: Mapping[str, Any], step: int, chain: int) -> bool:
    """Whether a trace with this line of `lines_before` leads to a checkpoint that holds `chain`.

    `step` is the checkpoint's.
    """
    if not line:
        return chain == 0
    return int(line["chain"], 16) == chain if line["step"] <= step else _follows(line, chain)


def _follows(line: Mapping[str, Any], chain: int) -> bool:
    digests = [int(line[name], 16) for name in ("batch", "input", "gradients", "weights")]
    return line["chain"] == f"{combine([chain, *digests]):016x}"


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is incomplete or damaged."""
    try:
        line = parse_json(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return (
        line if not shapes.describe_misfit(line, (shapes.TRACE_LINE, shapes.TRACE_HEAD)) else None
    )
