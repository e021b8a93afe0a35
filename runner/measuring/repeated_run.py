"""Run a few steps with parts of a run replaced, and measure how long they take."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from samewise.runner.data import streams
from samewise.runner.data.loading import MicroBatch
from samewise.runner.interfaces import Outcome
from samewise.runner.optim.build import rule_of
from samewise.runner.records.checkpoint_writer import copy_to_cpu
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Progress, Run
from samewise.runner.training.state import restore, state_of

NEAR = 0.03
"""Relative difference below which two durations count as equal."""


class SetRate:
    """Run's schedule with the learning rate replaced.

    Parameter groups keep their proportions.

    Args:
        inner: The run's own schedule, which sets everything else as before the first step.
        run: Run with the optimizers.
        factor: Returns the factor of each group's configured learning rate at a step.
        fixed: Rules of `param_groups` whose groups keep their learning rate.
    """

    def __init__(
        self, inner: Any, run: Run, factor: Callable[[int], float], *, fixed: Collection[str] = ()
    ) -> None:
        self._inner, self._run, self._factor, self._fixed = inner, run, factor, fixed

    def before_step(self, step: int) -> None:
        """Set the step's options."""
        self._inner.before_step(0)
        for phase in self._run.phases:
            for group in phase.optimizer.param_groups:
                rate = float(group["initial_lr"]) * (
                    1.0 if rule_of(group) in self._fixed else self._factor(step)
                )
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RepeatedRun:
    """Run whose first steps are taken several times, each time from its initial state."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # A copy, as training changes the run's own tensors in place
        self._state = copy_to_cpu(state_of(run))

    def steps(self, count: int, **parts: Any) -> Iterator[tuple[Outcome, float]]:
        """Take steps with `parts` in place of the run's parts.

        Args:
            count: Number of steps.
            parts: Fields of the run to replace.

        Yields:
            Each outcome and its duration in seconds, including the wait for the batch.
        """
        restore(self._run, copy_to_cpu(self._state))
        run = replace(self._run, total_steps=count, progress=Progress(), **parts)
        with streams.preserve_generators():
            batches: Iterator[list[MicroBatch]] | None = TrainingBatches(run)
            try:
                for _ in range(count):
                    start = time.perf_counter()
                    outcome = train_step(run, next(batches))
                    run.recorder.trace.record(
                        outcome.step,
                        batch=outcome.batch,
                        inputs=outcome.inputs,
                        loss=sum(outcome.losses.values()),
                    )
                    if run.strategy.device.type == "cuda":
                        torch.cuda.synchronize()
                    yield outcome, time.perf_counter() - start
            finally:
                # This also ends the workers
                batches = None
                self._run.clear_gradients()
                gc.collect()


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Format settings as overrides."""
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]
