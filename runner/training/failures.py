"""Explains the errors that end a training."""

from __future__ import annotations

import errno

from samewise.runner.errors import ConfigError, DataError, Problem, TrainingError
from samewise.runner.training.memory import out_of_memory
from samewise.runner.training.run import Run
from samewise.runner.training.step_errors import (
    OF_STEPS,
    explain_later_error,
    explain_step_error,
    killed_worker,
    name_override,
    refused_operator,
)


def explain(run: Run, error: BaseException) -> BaseException:
    """Turn a known error into a problem that a user can solve; return others unchanged."""
    # First, since torch also raises a RuntimeError in a rank that has lost another
    error = run.strategy.peers.explain(error, step=run.step + 1)
    if isinstance(error, RuntimeError) and (
        problem := refused_operator(error) or killed_worker(error)
    ):
        return TrainingError(problem)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        hint = "free some space, then run the same command again to resume"
        return TrainingError(
            Problem(str(error.filename or run.folder.path), "the disk is full", hint=hint)
        )
    if too_much := out_of_memory(run, error):
        # In the first step the settings are at fault, which has another exit code
        return (TrainingError if run.step else ConfigError)(too_much)
    if run.step == 0 and isinstance(error, DataError):
        return DataError(*[name_override(problem, run.composed) for problem in error.problems])
    if run.step == 0 and isinstance(error, (*OF_STEPS, SystemExit)):
        return ConfigError(explain_step_error(error, run.composed, run))
    return (
        TrainingError(explain_later_error(error, run))
        if isinstance(error, (*OF_STEPS, SystemExit))
        else error
    )
