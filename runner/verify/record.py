"""A run's record as it is verified, what it lacks, and why it cannot be verified."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.runner.config.compose import Composed
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import kept_sources, sources
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.components import make_part
from samewise.runner.verify.request import Request
from samewise.runner.verify.rerun_comparison import Comparison


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
    if strategy.level != "R2" and strategy.processes(str(cfg.device), cfg.replicas) > 1:
        name = type(strategy).__name__.lower()
        hint = (
            "train it again with `samewise train --fresh`, and compare the two runs with "
            "`samewise diff`"
        )
        raise ConfigError(
            Problem(
                "strategy",
                f"`verify` trains again in one process, and strategy={name} needs several",
                name,
                "single or elastic",
                hint,
            )
        )


def require_length(steps: int, last: int, unlike: Sequence[str]) -> None:
    """Raise a ConfigError if overrides only end training before the last step to compare."""
    # The result would be a different summary, and nothing else
    if unlike and steps < last and {"max_steps", "max_epochs"}.issuperset(unlike):
        hint = f"without {' and '.join(unlike)}, `--steps {steps}` compares the first {steps}"
        raise ConfigError(
            Problem(
                unlike[0],
                f"training would end after step {steps}, before step {last}, the last to compare",
                hint=hint,
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
        hint = (
            "a run's folder has it; tracking.log_checkpoint=true sends it to MLflow at the "
            "end of training"
            if traced
            else "train with trace.every_steps=1"
        )
        return Problem(request.run, "there is no trace to compare with", hint=hint)
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
