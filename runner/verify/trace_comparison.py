"""Finds the first step at which two runs' traces differ, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.journal import logged_values
from samewise.runner.verify.divergence import (
    Divergence,
    explain,
    first_divergence,
    other_start,
    same_start,
    unknown_since,
)


def trace_divergence(
    folders: Sequence[RunFolder],
    heads: Sequence[Any],
    traces: Sequence[Any],
    stages: Sequence[str],
    settings: Sequence[str],
) -> Divergence | None:
    """Where two runs' traces first differ, given their heads and lines, the stages to compare and
    the settings that differ.
    """
    (head, other), (one, two) = heads, traces
    if start := other_start(head, other):
        return start
    both = sorted(one.keys() & two.keys())
    journals = [logged_values(folder.metrics) for folder in folders]
    several = any(
        len((read_json(folder.environment, shapes.ENVIRONMENT) or {}).get("optimizers", ())) > 1
        for folder in folders
    )
    for step in both:
        lines = one[step], two[step]
        if not (found := first_divergence(head, *lines, other=other, stages=stages)):
            continue
        logged = _of_step(journals, step)
        since = unknown_since(step, both)
        known = same_start(head, other, step) or (
            step > both[0]
            and since == step
            and "weights" in stages
            and head["weights"] == other["weights"]
        )
        stage, layer, reason = explain(
            found, heads, lines, settings, logged=logged, several=several, known=known
        )
        if stage in ("loss", "gradients") and not known:  # what the step began with
            reason += "; or the weights before that step differ" + (
                ", which a trace does not record" if step == both[0] else ""
            )
        return Divergence(step, stage, layer, reason, since=since)
    return None


def _of_step(
    journals: Sequence[Mapping[tuple[int, str], float]], step: int
) -> dict[str, tuple[float, float]]:
    """What two runs both logged of a step's losses and gradient norms, by name and in order."""
    first, second = journals
    names = [
        name
        for at, name in first
        if at == step
        and name.startswith("train/")
        and not name.startswith("train/lr")
        and (step, name) in second
    ]
    return {name.removeprefix("train/"): (first[step, name], second[step, name]) for name in names}
