"""Reads traces: line by line, for comparison, or only the lines that lead to a run's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import merge
from itertools import groupby
from operator import itemgetter
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


class Steps(list[int]):
    """The first two steps and the last of some lines, and how many lines these were."""

    total = 0

    def add(self, step: int) -> None:
        self.total += 1
        self[2:] = [step]


def read_trace(
    path: Path, steps: Steps | None = None
) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return a trace's head, and its lines in order, each of which is read when it is asked for.

    A missing file is an empty trace; an incomplete last line is left out.

    Args:
        path: The file.
        steps: Gets the steps of the lines that have been read.

    Raises:
        DamagedFile: A line is not as it was written, so that a comparison would mean nothing; for a
            line after the head, when it is read.
    """
    lines = _lines(path, Steps() if steps is None else steps)
    return next(lines, {}), lines


def _lines(path: Path, steps: Steps) -> Iterator[dict[str, Any]]:
    """Yield a trace's head, then its lines."""
    previous = 0
    for number, text in read_lines(path):
        if not text.endswith(b"\n"):
            return
        line = _require_line(path, number, text)
        if number == 1:
            algorithm_of(path, line)
        else:
            step = line["step"]
            # The chain before the first line is unknown if the trace begins later
            follows = _follows(line, previous) and step > max(steps, default=0)
            if (steps or step == 1) and not follows:
                raise damaged_file(
                    path,
                    f"line {number} does not follow from the one before "
                    f"it{f' (steps {steps[-1]} and {step})' if steps else ''}",
                )
            previous = int(line["chain"], 16)
            steps.add(step)
        yield line


def common_lines(
    lines: Iterable[dict[str, Any]], other_lines: Iterable[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Yield both lines of each step that two traces have in common; read both to their ends."""
    step_of = itemgetter("step")
    for _, group in groupby(merge(lines, other_lines, key=step_of), key=step_of):
        if len(pair := list(group)) == 2:
            yield pair


def read_trace_of(
    folder: RunFolder, steps: Steps
) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return the head and the lines of a run's trace, as `read_trace`.

    Raises:
        DamagedFile: The trace is damaged, empty, or shorter than the summary says.
    """
    head, lines = read_trace(folder.trace, steps)
    summary = read_json(folder.summary, shapes.SUMMARY) or {}
    taken = int(summary.get("steps", 0))
    if not head and folder.trace.exists() and taken:
        raise damaged_file(folder.trace, "it is empty")
    return head, _whole(folder, lines, steps, taken)


def _whole(
    folder: RunFolder, lines: Iterator[dict[str, Any]], steps: Steps, taken: int
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's trace; raise DamagedFile if the run has `taken` more steps."""
    yield from lines
    every = _interval(folder, steps)
    if steps and every and steps[-1] < taken - taken % every:
        raise damaged_file(folder.trace, f"it ends at step {steps[-1]}, but the run took {taken}")


def _interval(folder: RunFolder, steps: Collection[int]) -> int:
    """Return the steps between a trace's last lines, by the run's config; 0 without lines."""
    # By the config and not by the lines, since a resumed run may have another interval
    match = re.search(
        r"^trace:\n(?:  .*\n)*?  every_steps: (\d+)$", read_text(folder.config) or "", re.MULTILINE
    )
    return int(match[1]) if match else min(steps, default=0)


def missing_start(steps: Collection[int]) -> str:
    """Return a sentence if a trace lacks its first steps, otherwise ""."""
    first, second = [*steps, 0, 0][:2]
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
