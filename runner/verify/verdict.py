"""The verdict on a run: its record is checked, and compared with a second training."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samewise.runner.config import saved
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import identity
from samewise.runner.config.project import Project
from samewise.runner.config.tree import differences, shown
from samewise.runner.errors import ConfigError, first_line
from samewise.runner.records import environment, shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trace import STAGES
from samewise.runner.results import Verification
from samewise.runner.tracking.journal import logged_values
from samewise.runner.training.build import build
from samewise.runner.training.run import Run
from samewise.runner.verify import record_comparison, rerun_comparison
from samewise.runner.verify.divergence import Divergence
from samewise.runner.verify.record import (
    Record,
    changed_code,
    nothing_to_compare,
    require_length,
    require_one_process,
    unknown,
)
from samewise.runner.verify.request import QUIET, Request
from samewise.runner.verify.second_training import train_again
from samewise.runner.verify.step_inspection import explain_difference


def verify_run(
    folder: RunFolder, composed: Composed, project: Project, request: Request
) -> Verification:
    """Check a run's record, then compare it with a second training in a temporary folder.

    Prints whether the same bits can be expected before it trains.

    Args:
        folder: The run's folder.
        composed: The config from `request.config_of`; its environment variables must be set.
        project: The packages that the config may name.
        request: The request.

    Returns:
        The verdict, with lines to print.

    Raises:
        ConfigError: The run cannot be repeated here, or there is nothing to compare.
    """
    original = record_comparison.recorded_config(folder, request.overrides)
    record = Record(
        folder,
        original,
        differences(identity(original.whole), identity(composed.whole))
        if request.overrides
        else [],
        read_json(folder.environment, shapes.ENVIRONMENT) or {},
    )
    # Before `build`, whose own error for too few processes gives other advice
    require_one_process(composed, project)
    comparison = rerun_comparison.Comparison(folder, steps=request.steps)
    every = original.cfg.trace.every_steps
    if not comparison.total and (
        problem := nothing_to_compare(request, folder, comparison.steps, every)
    ):
        raise ConfigError(problem)
    with tempfile.TemporaryDirectory(prefix="samewise-verify-") as temporary:
        again = build(composed, project, RunFolder(Path(temporary)))
        last = max(comparison.steps, default=0)
        require_length(again.total_steps, min(request.steps or last, last), record.settings)
        return _compare(request, record, again, comparison, (composed, project))


def _compare(
    request: Request,
    record: Record,
    again: Run,
    comparison: rerun_comparison.Comparison,
    parts: tuple[Composed, Project],
) -> Verification:
    """Compare a run's record with a second training, built from `parts`."""
    folder = record.folder
    foreign = (
        environment.differences(record.environment, again.environment) if record.environment else []
    )
    changed = changed_code(folder)
    lines = [*unknown(request, record, comparison), *changed]
    verdict = Verification(folder.path, messages=lines)
    if foreign and not request.anyway:
        reason = record_comparison.describe_foreign(foreign, record.settings)
        lines += [f"not comparable: {reason}", "add `--anyway` to compare them nevertheless"]
        return replace(verdict, comparable=False)
    if record.environment:
        print(
            environment.expectation(
                record.environment, again.environment, foreign, same_code=not changed
            ),
            file=sys.stderr,
            flush=True,
        )
    divergences = _repeat(request, record, again, comparison, lines)
    first, differing = None, _first_apart(divergences)
    # No step computes the initial weights
    if differing and differing.stage != "initial" and not request.coarse:
        first, sentences = _inspect_step(record, *parts, differing.step, same_code=not changed)
        lines += sentences
    lines += [
        f"the config differs: {path}: {shown(there)} there, {shown(here)} here"
        for path, there, here in record.unlike
    ]
    earliest = min(divergences, key=lambda divergence: divergence.step, default=None)
    return replace(
        verdict,
        same=not divergences,
        compared=comparison.compared,
        parts=earliest
        and {key: getattr(earliest, key) for key in ("step", "stage", "layer", "reason")},
        first=first,
    )


def _repeat(
    request: Request,
    record: Record,
    again: Run,
    comparison: rerun_comparison.Comparison,
    lines: list[str],
) -> list[Divergence]:
    """Train again, add lines that describe the result, and return the differences by step."""
    # Its metrics measure the machine, and are not compared
    again.callbacks.pop("throughput", None)
    # The run may have logged any step
    again.recorder.log_every_steps = 1
    again.callbacks["verify"] = comparison
    again.recorder.trace.algorithm = comparison.algorithm
    left_out = record_comparison.left_out_on_resuming(record.folder.metrics)
    divergences, messages = train_again(
        again, comparison, record.folder, request.steps, record.settings, left_out
    )
    lines += messages
    lines += [
        f"cannot be verified: {name}, which training again does not log, nor did the "
        "run once it had been resumed"
        for name in sorted(
            record_comparison.unlogged(left_out, logged_values(again.folder.metrics))
        )
    ]
    return sorted(divergences, key=lambda divergence: divergence.step)


def _first_apart(divergences: Sequence[Divergence]) -> Divergence | None:
    """Return the first divergence of the training itself, rather than of its record."""
    stages = ("initial", *STAGES)
    return next((fault for fault in divergences if fault.stage in stages), None)


def _inspect_step(
    record: Record, composed: Composed, project: Project, step: int, *, same_code: bool
) -> tuple[dict[str, str] | None, list[str]]:
    """Find the first value in which a step differs, and describe the reason."""
    with (
        tempfile.TemporaryDirectory(prefix="samewise-verify-") as folder,
        tempfile.TemporaryDirectory(prefix="samewise-verify-") as two,
    ):
        changed = bool(record.unlike)
        as_it_was = composed if not changed else saved.config_in(record.folder.config, QUIET)
        runs = [
            build(config, project, RunFolder(Path(place)))
            for config, place in ((as_it_was, folder), *(((composed, two),) if changed else ()))
        ]
        for run in runs:
            run.callbacks.pop("throughput", None)
        try:
            message, first = explain_difference(
                record.folder, step, runs[0], runs[1] if changed else None, same_code=same_code
            )
        # User code may fail in any way when it is repeated, and the verdict is known already
        except Exception as error:
            return None, [
                f"step {step} could not be examined closely: {type(error).__name__}: "
                f"{first_line(error)}"
            ]
    return {"kind": first.kind, "name": first.name} if first else None, message
