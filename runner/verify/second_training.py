"""Trains a recorded run again, and compares everything that it recorded."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from samewise.runner.errors import CheckpointError, SamewiseError, first_line, number_of
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records import checkpoint, shapes, trace_reader
from samewise.runner.records.checkpoint import list_checkpoints
from samewise.runner.records.checkpoint_writer import Checkpoints
from samewise.runner.records.files import parse_json, read_json, read_lines
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.journal import logged_values, read_entries
from samewise.runner.training.loop import fit
from samewise.runner.training.run import Run
from samewise.runner.verify.divergence import (
    Divergence,
    describe_tensors,
    first_divergence,
    only_in,
    other_start,
    trace_divergence,
)
from samewise.runner.verify.record_comparison import (
    MEASURED,
    artifact_divergences,
    logged_divergences,
    summary_divergences,
)
from samewise.runner.verify.state_comparison import parameter_names, state_differences


class Diverged(SamewiseError):
    """Ends the second training at the first step that differs."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"step {step} differs")


@final
class Comparison(Callback):
    """Compares each step's trace line with the recorded run's.

    Args:
        folder: The recorded run's folder.
        steps: The number of steps to compare; None: all.
        is_audit: Whether only parts are trained, whose ends are no ends of the training.
    """

    def __init__(
        self, folder: RunFolder, *, steps: int | None = None, is_audit: bool = False
    ) -> None:
        self._folder = folder
        self.steps = trace_reader.Steps()
        """The steps in the recorded run's trace."""
        self._head, lines = trace_reader.read_trace_of(folder, self.steps)
        self.algorithm = trace_reader.algorithm_of(folder.trace, self._head)
        """The algorithm of the recorded digests, for the second training."""
        self.total = sum(steps is None or line["step"] <= steps for line in lines)
        """The number of steps to compare: those in the trace, such as every hundredth."""
        self.missing = trace_reader.missing_start(self.steps)
        """A description of lines that the trace lacks."""
        self.compared = 0
        # Train to the end if the summary is compared too
        self._to_the_end = is_audit or (steps is None and folder.summary.exists())
        summary = (read_json(folder.summary, shapes.SUMMARY) or {}) if self._to_the_end else {}
        # A sparse trace ends earlier
        self._stopped, self._stop_at = (
            summary.get("stopped_early"),
            max([summary.get("steps", 0), *self.steps]),
        )
        # The lines are read again, each at its step
        _, self._lines = trace_reader.read_trace(folder.trace)
        self._line = next(self._lines, {"step": 0})
        self._is_at_stop = self._has_begun = False

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        while self._line["step"] < min(outcome.step, max(self.steps, default=0)):
            self._line = next(self._lines)
        expected, actual = self._line, run.traced
        # Only a run that stopped before its last step needs a reason
        self._is_at_stop = self._stop_at <= outcome.step < run.total_steps
        if not self._has_begun and other_start(self._head, _head_of(run)):
            raise Diverged(outcome.step)
        self._has_begun = True
        if not expected["step"] == actual.get("step") == outcome.step:
            return
        if first_divergence(self._head, expected, actual):
            raise Diverged(outcome.step)
        self.compared += 1

    def divergence(self, again: RunFolder, step: int, settings: Collection[str]) -> Divergence:
        """Return the first difference.

        Args:
            again: The second training's folder.
            step: The step that differs.
            settings: The settings that differ, which may explain it.
        """
        head, lines = trace_reader.read_trace(again.trace)
        _, recorded = trace_reader.read_trace(self._folder.trace)
        divergence = trace_divergence(
            (self._folder, again),
            (self._head, head),
            (recorded, lines),
            trace_reader.Steps(),
            settings=settings,
        )
        other_tensors = describe_tensors(
            [only_in(self._head, head), only_in(head, self._head)], ("there", "here")
        )
        if divergence and not (other_tensors and divergence.stage in ("gradients", "weights")):
            return divergence
        return Divergence(step, "weights", "", other_tensors)

    def stop_reason(self) -> str | None:
        if self._stopped and self._is_at_stop:
            # The reason may not occur here, such as the decision of a sweep
            return self._stopped
        if self.compared < self.total or self._to_the_end:
            return None
        return "everything that the first run recorded has been compared"


def _head_of(run: RunView) -> dict[str, Any]:
    # The first line of a trace is its head
    _, line = next(read_lines(run.folder / "trace.jsonl"), (1, b"{}"))
    return parse_json(line)


def train_again(
    again: Run,
    comparison: Comparison,
    folder: RunFolder,
    steps: int | None,
    settings: Collection[str],
) -> tuple[list[Divergence], list[str]]:
    """Train a run again, and compare it with its record.

    Args:
        again: A new run of the recorded run's config.
        comparison: One of its callbacks.
        folder: The recorded run's folder.
        steps: The number of steps to train; None: all.
        settings: The settings that differ, which may explain a difference.

    Returns:
        The differences, and lines that describe the result.
    """
    values, recorded = (
        [
            (entry.step, name, value)
            for entry, _ in read_entries(folder.metrics)
            for name, value in entry.metrics.items()
        ],
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
        )
        return [divergence, *differences], [f"diverges at {divergence}", *map(str, differences)]
    logged = logged_values(again.folder.metrics)
    differences = logged_divergences(values, logged, until=None if recorded else again.step)
    # A checkpoint that differs only because its evaluation does tells nothing new
    evaluated = bool(differences)
    if not recorded:
        # This training evaluates at its end, where the run may not have done so
        states.pop(again.step, None)
    differences += [
        x
        for step, differing in states.items()
        if (x := checkpoint_divergence(step, differing, evaluated=evaluated))
    ]
    if recorded:
        differences += summary_divergences(recorded, summary)
        differences += artifact_divergences(folder, again.folder, again.step)
    notes = list[str]()
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


def checkpoint_divergence(
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
    return Divergence(
        step,
        "summary" if counted is results else "checkpoint",
        f"metrics.{name.replace(': ', '.')}" if counted is results else "",
        f"step-{step:08d} has another state than training again: "
        f"{name}{f' ({values})' if values else ''} differs{more}",
    )
