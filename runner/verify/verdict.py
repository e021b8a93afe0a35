"""The verdict on a run: its record is checked, and compared with a second training."""

import shlex
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samewise.runner.config import saved
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import identity
from samewise.runner.config.project import Project
from samewise.runner.config.tree import differences, shown
from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.records import environment, kept_sources, shapes, sources
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trace import STAGES
from samewise.runner.results import Verification
from samewise.runner.training.build import build
from samewise.runner.training.components import make_part
from samewise.runner.training.run import Run
from samewise.runner.verify import record_comparison
from samewise.runner.verify.audit import draw_parts, train_parts
from samewise.runner.verify.divergence import Divergence
from samewise.runner.verify.request import QUIET, Request
from samewise.runner.verify.second_training import Comparison, train_again
from samewise.runner.verify.step_inspection import explain_difference


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
    if request.audit and record.unlike:
        raise ConfigError(
            Problem(
                record.settings[0],
                "cannot be overridden in an audit, which trains from recorded states",
                hint="leave it out, or verify without --audit",
            )
        )
    # `--steps` limits each part of an audit
    steps, is_audit = (None, True) if request.audit else (request.steps, False)
    comparison = Comparison(folder, steps=steps, is_audit=is_audit)
    if not comparison.total and (
        problem := nothing_to_compare(
            request, folder, comparison.steps, original.cfg.trace.every_steps
        )
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
    comparison: Comparison,
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
                record.environment,
                again.environment,
                [*foreign, *(f"the config differs in {path}" for path in record.settings)],
                same_code=not changed,
            ),
            file=sys.stderr,
            flush=True,
        )
    audit = (
        draw_parts(again, comparison, folder, count=request.audit, steps=request.steps)
        if request.audit
        else None
    )
    divergences = _repeat(request, record, again, comparison, lines, audit)
    first, stages = None, ("initial", *STAGES)
    # The first divergence of the training itself, rather than of its record
    differing = next((fault for fault in divergences if fault.stage in stages), None)
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
        audit=audit,
        parts=earliest
        and {key: getattr(earliest, key) for key in ("step", "stage", "layer", "reason")},
        first=first,
    )


def _repeat(
    request: Request,
    record: Record,
    again: Run,
    comparison: Comparison,
    lines: list[str],
    audit: Sequence[tuple[int, int]] | None,
) -> list[Divergence]:
    """Train all or an audit's parts again, and return the differences by step.

    Adds lines that describe the result.
    """
    # Its metrics measure the machine, and are not compared
    again.callbacks.pop("throughput", None)
    # The run may have logged any step
    again.recorder.log_every_steps = 1
    again.callbacks["verify"] = comparison
    again.recorder.trace.algorithm = comparison.algorithm
    divergences, messages = (
        train_again(again, comparison, record.folder, request.steps, record.settings)
        if audit is None
        else train_parts(again, comparison, record.folder, audit, record.settings)
    )
    lines += messages
    return sorted(divergences, key=lambda divergence: divergence.step)


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


def changed_code(folder: RunFolder) -> list[str]:
    """Describe how the user's code differs from the run's."""
    changed = [f"the code differs: {line}" for line in sources.list_changes(folder.sources)]
    if changed and any(kept_sources.texts_of(folder.sources).values()):
        command = f"samewise diff {shlex.quote(str(folder.path))}"
        changed.append(f"`{command}` shows the lines of code that differ")
    return changed


def unknown(request: Request, record: Record, comparison: Comparison) -> list[str]:
    """Describe what the record lacks, so that it cannot be verified."""
    folder = record.folder
    lacking = [f"{folder.path}: {comparison.missing}"] if comparison.missing else []
    if not folder.metrics.exists() and request.is_local(folder):
        lacking.append(f"{folder.metrics}: is missing: what the run logged was not compared")
    if not record.environment:
        lacking.append(
            f"{folder.environment}: is missing, so samewise cannot tell whether another "
            "environment explains a difference"
        )
    return lacking


def require_one_process(composed: Composed, project: Project) -> None:
    """Raise a ConfigError if one process cannot repeat the run's strategy to the bit."""
    cfg = composed.cfg
    strategy = make_part(cfg, project, "strategy")
    # R2 promises the same bits on any number of processes
    name = type(strategy).__name__.lower()
    ConfigError.raise_if(
        strategy.level != "R2" and strategy.processes(str(cfg.device), cfg.replicas) > 1,
        "strategy",
        f"`verify` trains again in one process, and strategy={name} needs several",
        name,
        "single or elastic",
        "train it again with `samewise train --fresh`, and compare the two runs with "
        "`samewise diff`",
    )


def require_length(steps: int, last: int, unlike: Sequence[str]) -> None:
    """Raise a ConfigError if overrides only end training before the last step to compare."""
    # The result would be a different summary, and nothing else
    if unlike and steps < last and {"max_steps", "max_epochs"}.issuperset(unlike):
        raise ConfigError(
            Problem(
                unlike[0],
                f"training would end after step {steps}, before step {last}, the last to compare",
                hint=f"without {' and '.join(unlike)}, `--steps {steps}` compares the first {steps}",
            )
        )


def nothing_to_compare(
    request: Request, folder: RunFolder, traced: Collection[int], every: int
) -> Problem | None:
    """Return the problem that there is nothing to compare; None if results can be compared.

    Args:
        request: The request, none of whose steps are traced.
        folder: The run's folder.
        traced: The steps in the trace.
        every: The run's `trace.every_steps`.
    """
    if not folder.trace.exists():
        return _no_trace(request, folder, traced=bool(every))
    without = f"no step has a line in the trace: trace.every_steps={every}"
    if request.steps is None:
        return (
            None
            if folder.summary.exists()
            else Problem(
                str(folder.path),
                f"{without}, and the run has not ended",
                hint="train it to the end",
            )
        )
    if not traced:
        return Problem(
            "--steps",
            without,
            request.steps,
            hint="without --steps, the weights and the results are compared",
        )
    return Problem(
        "--steps",
        f"no step up to there has a line in the trace: trace.every_steps={every}",
        request.steps,
        f"at least {min(traced)}",
    )


def _no_trace(request: Request, folder: RunFolder, *, traced: bool) -> Problem:
    if not request.is_local(folder):
        return Problem(
            request.run,
            "there is no trace to compare with",
            hint="a run's folder has it; tracking.log_checkpoint=true sends it to MLflow at the "
            "end of training"
            if traced
            else "train with trace.every_steps=1",
        )
    was = (
        "is missing, although the run was trained with one"
        if traced
        else "is missing: the run was trained without one"
    )
    command = (
        f"samewise train --config {shlex.quote(str(folder.config))} "
        f"--fresh{'' if traced else ' trace.every_steps=1'}"
    )
    return Problem(
        str(folder.trace), was, hint=f"`{command}` trains it again, beside this run, with a trace"
    )
