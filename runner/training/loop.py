"""The whole loop. What it calls is a part of `Run`; a strategy's `carry` calls `forward`.

One optimizer step: for each micro-batch that this process carries, enter its stream, transform on
the device, forward, loss, backward; then add up over replicas in a fixed order, average, clip,
check that all is finite, step. A device is waited for last, when all of this and the digests have
been launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from torch import Tensor

from samewise.runner.data.loading import MicroBatch
from samewise.runner.interfaces import Outcome
from samewise.runner.optim.gradients import separate_gradients
from samewise.runner.optim.stepping import step_of
from samewise.runner.strategies.base import Tally
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.evaluation import evaluate
from samewise.runner.training.guards.first_steps import warn_of_hidden_state
from samewise.runner.training.losses import loss_of
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.readings import Readings
from samewise.runner.training.run import Run, checkpoint_due, evaluation_due, is_done
from samewise.runner.training.session import session
from samewise.runner.training.state import save

_Forward = tuple[Tensor, Tensor, Callable[[], Tally]]
"""The loss, the gradient that its backward pass begins with, and a call that gives the tally."""


def fit(run: Run) -> dict[str, Any]:
    """Train from wherever the run stands to the end; return its summary.

    Raises:
        Interrupted: If asked to stop; the run is saved.
        TrainingError: If something is not finite or not deterministic, or a disk is full.
    """
    # Loading begins with the session. Its workers end after the other processes know of an error.
    with closing(TrainingBatches(run)) as loaded, session(run) as summary:
        batches = warn_of_hidden_state(run, loaded)
        while True:
            if evaluation_due(run):
                evaluate(run)
            if checkpoint_due(run):
                save(run)
            if is_done(run):
                break
            run.recorder.record(train_step(run, next(batches), loaded.load_next))
    return summary


def train_step(
    run: Run, micro_batches: Sequence[MicroBatch], meanwhile: Callable[[], None] = lambda: None
) -> Outcome:
    """Take one optimizer step on one global batch; with several phases, one in each."""
    readings = Readings(run)
    run.schedule.before_step(run.step)
    for phase in run.phases:
        run.clear_gradients()
        with phase.training(run.step):
            tallies = run.strategy.carry(micro_batches, partial(forward, run, phase))
        run.held.require_same()
        tally = run.strategy.reduce(tallies)
        norm = phase.condition_gradients(tally, run.precision, run.clip_norm)
        readings.add(phase, tally, norm, tallies)  # on the CPU, what is not finite ends here
        run.precision.stepper(phase.optimizer, step_of(phase.optimizer))()
        run.recorder.trace.digest_gradients(run.step + 1)
    if run.step == 0:
        run.held.require_same_state()
    run.recorder.trace.digest_weights(run.step + 1)
    meanwhile()  # all is launched, and nothing waited for
    readings.finish()  # on a device, here
    run.precision.update()
    run.progress.step += 1
    return readings.outcome()


def forward(run: Run, phase: TrainingPhase, micro: MicroBatch) -> _Forward:
    """Compute a micro-batch's loss, its first gradient, and what to call after the backward pass."""
    batch, loss = loss_of(run, phase, micro)
    nominal = loss.count if run.micro_batches == 1 else run.batch_size
    first = run.precision.first_gradient(loss.total, nominal)

    def after() -> Tally:
        separate_gradients(run.parameters)
        seen = run.recorder.trace.digests(run.step + 1, micro.batch, batch)
        return Tally.of(loss, nominal=nominal, seen=seen)

    return loss.total, first, after
