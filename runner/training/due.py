"""What is due at a step, computed from the step alone, so that a resumed run does what was left."""

from __future__ import annotations

from samewise.runner.errors import Interrupted, Problem
from samewise.runner.training.run import Run


def evaluation_due(run: Run) -> bool:
    """Whether an evaluation is due and has not been done."""
    if run.progress.evaluated == run.step or _at_start(run):
        return False
    every = evaluation_interval(run)
    return at_end(run) or (bool(every) and run.step % every == 0)


def evaluation_interval(run: Run) -> int:
    """Steps between two evaluations; 0: only at the end."""
    return run.evaluate.every_steps or (run.evaluate.every_epochs or 0) * run.plan.steps_per_epoch


def checkpoint_due(run: Run) -> bool:
    """Whether a checkpoint is due, or the run was asked to stop."""
    settings = run.checkpoint
    if run.recorder.saved == run.step or _at_start(run):
        return False
    by_steps = bool(settings.every_steps) and run.step % settings.every_steps == 0
    by_epochs = (
        bool(settings.every_epochs)
        and run.step % (settings.every_epochs * run.plan.steps_per_epoch) == 0
    )
    is_best = settings.keep_best > 0 and any(
        one.get("step") == run.step for one in (run.progress.best, *run.progress.also.values())
    )
    return (
        by_steps
        or by_epochs
        or is_best
        or at_end(run)
        or run.strategy.peers.stop_agreed is not None
    )


def is_done(run: Run) -> bool:
    """Whether training has ended.

    Interrupted if it was asked to stop earlier, TrainingError if the last checkpoint could not be
    written.
    """
    run.checkpoints.raise_failure()
    if at_end(run):
        return True
    if reason := run.strategy.peers.stop_agreed:
        raise Interrupted(
            Problem(
                f"step {run.step}",
                f"stopped by {reason}, and saved",
                hint="run the same command again to resume",
            )
        )
    return False


def at_end(run: Run) -> bool:
    """Whether no step is left, or a callback ends training."""
    return run.step >= run.total_steps or run.recorder.stop_reason() is not None


def _at_start(run: Run) -> bool:
    """Whether nothing has been trained yet, and something will be."""
    return run.step == 0 < run.total_steps
