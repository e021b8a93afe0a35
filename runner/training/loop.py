"""The training loop. Everything it calls is a part of `Run`; a strategy's `carry` calls `forward`.

An optimizer step computes, for each micro-batch of this process, the transforms on the device, the
forward pass, the loss and the backward pass, with random numbers keyed by step and micro-batch. It
then adds gradients over replicas in a fixed order, averages, clips, and lets the optimizers step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor

from samewise.runner.data.loading import MicroBatch
from samewise.runner.interfaces import Outcome
from samewise.runner.optim.gradients import separate_gradients
from samewise.runner.optim.stepping import step_of
from samewise.runner.strategies.base import Tally
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.evaluation import evaluate
from samewise.runner.training.guards.catalogue import watch
from samewise.runner.training.losses import loss_of
from samewise.runner.training.phase import TrainingPhase, turns_of
from samewise.runner.training.readings import Readings
from samewise.runner.training.run import Guard, Run, checkpoint_due, evaluation_due, is_done
from samewise.runner.training.session import session
from samewise.runner.training.state import save

_LEAST, _MOST = 10, 100
"""The steps whose losses say what a spike is."""
_Forward = tuple[Tensor, Tensor, Callable[[], Tally]]
"""The loss, its initial gradient for `backward`, and a function that returns the tally."""


def fit(run: Run) -> dict[str, Any]:
    """Train a run from its last checkpoint to the end.

    Args:
        run: The run, as `build` made it.

    Returns:
        The run's summary, as in `summary.json`.

    Raises:
        Interrupted: The run was asked to stop; it is saved.
        TrainingError: A number is not finite, an operator not deterministic, or the disk full.
    """
    # The session starts first: it restores the step at which loading begins. On an error it tells
    # the other processes before the workers are closed, which may take seconds.
    with closing(TrainingBatches(run)) as batches, session(run) as summary:
        while True:
            if evaluation_due(run):
                evaluate(run)
            if checkpoint_due(run):
                save(run)
            if is_done(run):
                break
            if run.step % run.plan.steps_per_epoch == 0:
                run.recorder.notify("on_epoch_start")
            run.recorder.record(train_step(run, next(batches), batches.load_next))
    return summary


def train_step(
    run: Run, micro_batches: Sequence[MicroBatch], meanwhile: Callable[[], None] = lambda: None
) -> Outcome:
    """Train each phase as often as it says, on one global batch.

    Args:
        run: The run; its step is one higher afterwards.
        micro_batches: This process's samples of the step.
        meanwhile: Called while a device computes the step.

    Returns:
        Losses, gradient norms and digests of the step.
    """
    watch(run, Guard.before_step, micro_batches)
    phases = turns_of(run.phases, run.step)
    readings = Readings(run, phases)
    run.schedule.before_step(run.step)
    for phase in phases:
        run.clear_gradients()
        if phase.spec.turn:
            # A loss scale serves only one step of an optimizer
            run.precision.update()
        with phase.training(run.step):
            tallies = run.strategy.carry(micro_batches, partial(forward, run, phase))
        tally = run.strategy.reduce(tallies)
        norm = phase.condition_gradients(tally, run.precision)
        # Before the optimizer steps: on the CPU, a number that is not finite raises an error here
        readings.add(phase, tally, norm, tallies)
        if not _is_spike(run, phase, tally):
            run.precision.stepper(phase.optimizer, step_of(phase.optimizer))()
        run.recorder.trace.digest_gradients(run.step + 1)
    run.recorder.trace.digest_weights(run.step + 1)
    # Everything is launched by now, so a device computes while the next batches are loaded
    meanwhile()
    # The only wait for a device in a step, unless skip_spikes, and the check for numbers that are
    # not finite
    readings.finish()
    run.precision.update()
    run.progress.step += 1
    watch(run, Guard.after_step)
    return readings.outcome()


def _is_spike(run: Run, phase: TrainingPhase, tally: Tally) -> bool:
    """Whether a phase's loss exceeds those before by `skip_spikes` standard deviations."""
    if run.skip_spikes is None:
        return False
    recent = run.progress.recent.setdefault(phase.spec.name, [])
    loss = float(tally.sums["loss"]) / tally.count
    is_spike = len(recent) >= _LEAST and loss > fmean(recent) + run.skip_spikes * pstdev(recent)
    # Also a spike's, so that losses that stay high are learned from again
    recent[:] = [*recent, loss][-_MOST:]
    if is_spike:
        prefix = "" if len(run.phases) == 1 else f"{phase.spec.name}/"
        run.recorder.log({f"train/{prefix}skipped": 1.0}, run.step + 1)
    return is_spike


def forward(run: Run, phase: TrainingPhase, micro: MicroBatch) -> _Forward:
    """Compute a micro-batch's loss, its initial gradient, and the function that tallies it."""
    batch, loss = loss_of(run, phase, micro)
    nominal = loss.count if run.micro_batches == 1 else run.batch_size
    first = run.precision.first_gradient(loss.total, nominal)

    def after() -> Tally:
        separate_gradients(run.parameters)
        # After the backward pass, which may still read the batch; a digest changes neither
        return Tally.of(
            loss,
            nominal=nominal,
            digests=run.recorder.trace.digests(run.step + 1, micro.batch, batch),
        )

    return loss.total, first, after
