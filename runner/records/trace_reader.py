"""Reads traces: of a whole run, for comparison, or only the lines that lead to its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from samewise.runner.errors import DamagedFile, Problem
from samewise.runner.records import shapes
from samewise.runner.records.digest import ALGORITHMS, XXH3, combine
from samewise.runner.records.files import (
    damaged_file,
    parse_json,
    read_json,
    read_lines,
    read_text,
    require_shape,
    sha256,
)
from samewise.runner.records.folder import RunFolder


def read_trace(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """A trace's head, and its lines by step.

    A missing file is an empty trace; an incomplete last line is left out.

    DamagedFile if a line is not what was written, so that a comparison with it would be
    meaningless.
    """
    head, lines, before = dict[str, Any](), dict[int, dict[str, Any]](), None
    for number, text in read_lines(path):
        if not text.endswith(b"\n"):
            break
        line = _require_line(path, number, text)
        if "step" not in line:
            algorithm_of(path, head := line)
            continue
        step = line["step"]
        chain = 0 if step == 1 else before
        if chain is not None and not _follows(line, chain):
            raise damaged_file(
                path,
                f"line {number} does not follow from the one before "
                f"it{f' (steps {max(lines)} and {step})' if lines else ''}",
            )
        before = int(line["chain"], 16)
        lines[step] = line
    return head, lines


def read_trace_of(folder: RunFolder) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """A run's trace.

    DamagedFile if `read_trace` finds it damaged, or if it is empty or shorter than the summary, if
    there is one, says.
    """
    head, lines = read_trace(folder.trace)
    summary = read_json(folder.summary, shapes.SUMMARY) or {}
    steps = int(summary.get("steps", 0))
    if not head and folder.trace.exists() and steps:
        raise damaged_file(folder.trace, "it is empty")
    every = _interval(folder, lines)
    last = steps - steps % every if lines and every else 0
    if lines and max(lines) < last and summary.get("trace_sha256") == sha256(folder.trace):
        words = (
            f"`steps` was altered: it is {steps}, and the trace, which is the one that the "
            f"summary was written with, ends at step {max(lines)}"
        )
        raise DamagedFile(Problem(str(folder.summary), words))
    if lines and max(lines) < last:
        raise damaged_file(folder.trace, f"it ends at step {max(lines)}, but the run took {steps}")
    return head, lines


def _interval(folder: RunFolder, lines: Collection[int]) -> int:
    """How many steps apart the last lines of a run's trace should be, by its config, which may have
    been changed when it was resumed; 0: there are none.
    """
    found = re.search(
        r"^trace:\n(?:  .*\n)*?  every_steps: (\d+)$", read_text(folder.config) or "", re.MULTILINE
    )
    return int(found[1]) if found else min(lines, default=0)


def missing_start(lines: Mapping[int, Any]) -> str:
    """A sentence if a trace does not begin at the first step that it should have.

    Otherwise empty.
    """
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
    """The digest algorithm of a trace; DamagedFile if it is unknown."""
    name = head.get("algorithm", XXH3)
    if name not in ALGORITHMS:
        raise damaged_file(
            path,
            f"its digests are made by {name!r}, which this version of samewise does not support",
        )
    return name


def lines_before(path: Path, steps: Collection[int]) -> dict[int, dict[str, Any]]:
    """For each step, in order, the last line of a trace up to it that can be read.

    If there is none, the first after it, or an empty one.
    """
    found, pending, last = dict[int, dict[str, Any]](), sorted(steps), dict[str, Any]()
    for line in (
        line for _, text in read_lines(path) if (line := parse_line(text)) and "step" in line
    ):
        while pending and pending[0] < line["step"]:
            found[pending.pop(0)] = last or line
        last = line
    return found | dict.fromkeys(pending, last)


def leads_to(line: Mapping[str, Any], step: int, chain: int) -> bool:
    """Whether a trace with this line of `lines_before` leads to a checkpoint of `step` that holds
    `chain`.
    """
    if not line:
        return chain == 0
    return int(line["chain"], 16) == chain if line["step"] <= step else _follows(line, chain)


def _follows(line: Mapping[str, Any], chain: int) -> bool:
    return (
        line["chain"]
        == f"{combine([chain, *(int(line[name], 16) for name in ('batch', 'input', 'gradients', 'weights'))]):016x}"
    )


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it is incomplete or damaged."""
    try:
        line = parse_json(text) if text.endswith(b"\n") else None
    except ValueError:
        return None
    return (
        line if not shapes.describe_misfit(line, (shapes.TRACE_LINE, shapes.TRACE_HEAD)) else None
    )
