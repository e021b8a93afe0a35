"""Runs a few steps with parts of a run replaced, and measures how long they take.

Shared by the finders.
"""

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
"""Within this of the fastest is as fast."""


class SetRate:
    """A run's schedule with the learning rate replaced.

    Those of the parameter groups keep their proportions, but for those of `fixed` rules, which
    stay.

    Args:
        inner: The run's own, which sets what else it sets as before the first step.
        run: Its optimizers.
        factor: By step, what each group's learning rate from the config is multiplied by.
        fixed: Rules of `param_groups`.
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
    """A run whose first steps are taken several times, each time from its initial state."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._state = copy_to_cpu(state_of(run))

    def steps(self, count: int, **others: Any) -> Iterator[tuple[Outcome, float]]:
        """Take steps with `others` in place of the run's parts.

        Yields each outcome and its duration in seconds, including the wait for the batch.
        """
        restore(self._run, copy_to_cpu(self._state))
        run = replace(self._run, total_steps=count, progress=Progress(), **others)
        with streams.preserve_generators():
            batches: Iterator[list[MicroBatch]] | None = TrainingBatches(run)
            try:
                for _ in range(count):
                    began = time.perf_counter()
                    outcome = train_step(run, next(batches))
                    run.recorder.trace.record(
                        outcome.step,
                        batch=outcome.batch,
                        inputs=outcome.inputs,
                        loss=sum(outcome.losses.values()),
                    )
                    if run.strategy.device.type == "cuda":
                        torch.cuda.synchronize()
                    yield outcome, time.perf_counter() - began
            finally:
                batches = None  # also ends their workers
                self._run.clear_gradients()
                gc.collect()


def as_overrides(found: Mapping[str, Any]) -> list[str]:
    """Format settings as overrides."""
    return [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in found.items()
    ]
