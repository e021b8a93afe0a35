"""Trains a recorded run again, and compares everything that it recorded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from samewise.runner.errors import CheckpointError, first_line, number_of
from samewise.runner.records import checkpoint, shapes
from samewise.runner.records.checkpoint import list_checkpoints
from samewise.runner.records.checkpoint_writer import Checkpoints
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.journal import logged_values, read_entries
from samewise.runner.training.loop import fit
from samewise.runner.training.run import Run
from samewise.runner.verify.divergence import Divergence
from samewise.runner.verify.record_comparison import (
    MEASURED,
    artifact_divergences,
    logged_divergences,
    summary_divergences,
)
from samewise.runner.verify.rerun_comparison import Comparison, Diverged
from samewise.runner.verify.state_comparison import parameter_names, state_differences


def read_logged(folder: RunFolder) -> list[tuple[int, str, float]]:
    """Return step, name and value of each metric in the journal, which may have several values."""
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
    settings: Collection[str],
    left_out: Collection[str],
) -> tuple[list[Divergence], list[str]]:
    """Train a run again, and compare it with its record.

    Args:
        again: A new run of the recorded run's config.
        comparison: One of its callbacks.
        folder: The recorded run's folder.
        steps: The number of steps to train; None: all.
        settings: The settings that differ, which may explain a difference.
        left_out: Metrics to compare only if the second training has them.

    Returns:
        The differences, and lines that describe the result.
    """
    values, recorded = (
        read_logged(folder),
        read_json(folder.summary, shapes.SUMMARY) if steps is None else None,
    )
    again, states = _comparing_checkpoints(again, folder)
    try:
        summary = fit(again)
    except Diverged as diverged:
        divergence = comparison.divergence(again.folder, diverged.step, settings)
        differences = logged_divergences(
            values,
            logged_values(again.folder.metrics),
            # From the first difference on, all metrics may differ
            until=divergence.step - 1,
            left_out=left_out,
        )
        return [divergence, *differences], [f"diverges at {divergence}", *map(str, differences)]
    logged = logged_values(again.folder.metrics)
    differences = logged_divergences(
        values, logged, until=None if recorded else again.step, left_out=left_out
    )
    # A checkpoint that differs only because its evaluation does tells nothing new
    evaluated = bool(differences)
    if not recorded:
        # This training evaluates at its end, where the run may not have done so
        states.pop(again.step, None)
    differences += [
        x
        for step, differing in states.items()
        if (x := _of_checkpoint(step, differing, evaluated=evaluated))
    ]
    tables, notes = artifact_divergences(folder, again.folder, again.step) if recorded else ([], [])
    differences += [*summary_divergences(recorded, summary), *tables] if recorded else []
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
        [f"{comparison.compared} of {comparison.total} steps compared"] if comparison.total else []
    )
    if recorded and recorded["weights_sha256"] == summary["weights_sha256"]:
        compared.append(f"weights {summary['weights_sha256'][:16]}... in both")
    message = f"the same bits: {', '.join(compared)}" if compared else "no step was compared"
    if not comparison.total:
        message += (
            "; no step has a line in the trace "
            f"(trace.every_steps={again.config.trace.every_steps}, "
            f"{number_of(again.step, 'step')})"
        )
    if any(x.stage == "metric" for x in differences):
        notes.append(
            f"metrics that measure the machine belong under {', '.join(MEASURED)}: these "
            "are not compared"
        )
    return differences, [message, *map(str, differences), *notes]


def _comparing_checkpoints(
    again: Run, folder: RunFolder
) -> tuple[Run, dict[int, list[tuple[str, str]]]]:
    """Let the second training compare its state with recorded checkpoints, and write none.

    Returns:
        The training, and its differences by step, which are filled as it trains.
    """
    differing, names, paths = (
        dict[int, list[tuple[str, str]]](),
        parameter_names(again),
        {x.step: x.path for x in list_checkpoints(folder.checkpoints)},
    )

    class Compared(Checkpoints):
        def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
            try:
                differing[step] = (
                    state_differences(checkpoint.load(paths[step]), state, names)
                    if step in paths
                    else []
                )
            except CheckpointError as error:
                differing[step] = [("weights", first_line(error))]

    checkpoints = Compared(again.folder.checkpoints, again.checkpoint, {}, {})
    return replace(
        again,
        # The greatest interval at which each recorded checkpoint is due
        checkpoint=replace(again.checkpoint, every_steps=math.gcd(*paths) or None),
        checkpoints=checkpoints,
    ), differing


def _of_checkpoint(
    step: int, differing: Sequence[tuple[str, str]], *, evaluated: bool
) -> Divergence | None:
    """Return the divergence of a checkpoint whose state differs from the second training's.

    Args:
        step: The checkpoint's step.
        differing: The differences, from `state_differences`.
        evaluated: Whether evaluations differ, which explains differences of results.
    """
    # Values of callbacks other than tensors may depend on the machine, and are not compared
    trained = [x for x in differing if x[0].startswith(("weights", "the optimizer", "precision"))]
    results = [x for x in differing if x[0].startswith(("metrics", "best", "schedule"))]
    counted = trained or ([] if evaluated else results or [x for x in differing if not x[1]])
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
