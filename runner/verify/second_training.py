"""Trains a recorded run again, to compare all that it recorded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from samewise.runner.errors import CheckpointError, number_of
from samewise.runner.records import checkpoint, shapes
from samewise.runner.records.checkpoint import list_checkpoints
from samewise.runner.records.checkpoint_writer import Checkpoints
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.journal import logged_values, read_entries
from samewise.runner.training.loop import fit
from samewise.runner.training.run import Run
from samewise.runner.verify.audit import parameter_names, state_differences
from samewise.runner.verify.divergence import Divergence
from samewise.runner.verify.record_comparison import (
    MEASURED,
    artifact_divergences,
    logged_divergences,
    summary_divergences,
)
from samewise.runner.verify.rerun_comparison import Comparison, Diverged


def read_logged(folder: RunFolder) -> list[tuple[int, str, float]]:
    """Step, name and value of every logged metric; a journal may have several of one step and name."""
    return [
        (entry.step, name, value)
        for entry, _ in read_entries(folder.metrics)
        for name, value in entry.metrics.items()
    ]


def train_again(
    again: Run,
    comparison: Comparison,
    folder: RunFolder,
    steps: int | None,
    divergences: list[Divergence],
    left_out: Collection[str],
) -> list[str]:
    """Train all of it again, or the first `steps`.

    Return the result in words, and add what is found to `divergences`. `left_out`: of
    `logged_divergences`.
    """
    told, recorded = (
        read_logged(folder),
        read_json(folder.summary, shapes.SUMMARY) if steps is None else None,
    )
    again, states = _comparing_checkpoints(again, folder)
    try:
        summary = fit(again)
    except Diverged as diverged:
        found = logged_divergences(
            told,
            logged_values(again.folder.metrics),
            until=diverged.divergence.step - 1,
            left_out=left_out,
        )
        divergences += [*comparison.divergences, diverged.divergence, *found]
        return [
            *map(str, comparison.divergences),
            f"diverges at {diverged.divergence}",
            *map(str, found),
        ]
    logged = logged_values(again.folder.metrics)
    found = [
        *comparison.divergences,
        *logged_divergences(
            told, logged, until=None if recorded else again.step, left_out=left_out
        ),
    ]
    # What follows from another evaluation says no more
    known, evaluated = (
        {one.step for one in divergences},
        any(one.stage == "metric" for one in found),
    )
    if not recorded:
        # The end of this training evaluates, which the run may not have done there
        states.pop(again.step, None)
    found += [
        one
        for step, differing in states.items()
        if step not in known and (one := _of_checkpoint(step, differing, evaluated=evaluated))
    ]
    tables, notes = artifact_divergences(folder, again.folder, again.step) if recorded else ([], [])
    found += [*summary_divergences(recorded, summary), *tables] if recorded else []
    divergences += found
    if (
        recorded
        and summary["stopped_early"]
        and not any(
            callback.stop_reason()
            for callback in again.callbacks.values()
            if callback is not comparison
        )
    ):
        notes.append(
            f"cannot be verified: why training was stopped after step {again.step}; "
            f"recorded as {summary['stopped_early']!r}"
        )
    compared = (
        [f"{comparison.compared} of {comparison.wanted} steps compared"]
        if comparison.wanted
        else []
    )
    if recorded and recorded["weights_sha256"] == summary["weights_sha256"]:
        compared.append(f"weights {summary['weights_sha256'][:16]}... in both")
    message = f"the same bits: {', '.join(compared)}" if compared else "no step was compared"
    if not comparison.wanted:
        message += (
            "; no step has a line in the trace "
            f"(trace.every_steps={again.config.trace.every_steps}, "
            f"{number_of(again.step, 'step')})"
        )
    if any(one.stage == "metric" for one in found):
        notes.append(
            f"metrics that measure the machine belong under {', '.join(MEASURED)}: these "
            "are not compared"
        )
    return [message, *map(str, found), *notes]


def _comparing_checkpoints(
    again: Run, folder: RunFolder
) -> tuple[Run, dict[int, list[tuple[str, str]]]]:
    """The second training, such that it writes no checkpoint, and in what its state differs from
    each one that the recorded run kept, by step.
    """
    found, names, kept = (
        dict[int, list[tuple[str, str]]](),
        parameter_names(again),
        {one.step: one.path for one in list_checkpoints(folder.checkpoints)},
    )

    class Compared(Checkpoints):
        def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
            with suppress(CheckpointError):  # it is named elsewhere
                found[step] = (
                    state_differences(checkpoint.load(kept[step]), state, names)
                    if step in kept
                    else []
                )

    checkpoints = Compared(again.folder.checkpoints, again.checkpoint, {}, {})
    return replace(
        again,
        checkpoint=replace(again.checkpoint, every_steps=math.gcd(*kept) or None),
        checkpoints=checkpoints,
    ), found


def _of_checkpoint(
    step: int, differing: Sequence[tuple[str, str]], *, evaluated: bool
) -> Divergence | None:
    """A checkpoint whose state differs from the second training's.

    `evaluated`: whether evaluations are known to, so that what follows from them says no more.

    What a callback keeps besides tensors is left out: it may be of the machine.
    """
    trained = [
        one for one in differing if one[0].startswith(("weights", "the optimizer", "precision"))
    ]
    results = [one for one in differing if one[0].startswith(("metrics", "best", "schedule"))]
    counted = trained or ([] if evaluated else results or [one for one in differing if not one[1]])
    if not counted:
        return None
    (name, values), more = counted[0], f" (and {len(counted) - 1} more)" if counted[1:] else ""
    reason = (
        f"step-{step:08d} has another state than training again: "
        f"{name}{f' ({values})' if values else ''} differs{more}"
    )
    return Divergence(
        step,
        "summary" if counted is results else "checkpoint",
        f"metrics.{name.replace(': ', '.')}" if counted is results else "",
        reason,
    )
