"""Finds the loader's settings that make steps fastest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from samewise.runner.errors import number_of
from samewise.runner.measuring.repeated_run import NEAR, RepeatedRun, SetRate
from samewise.runner.training.run import Run

_ROUNDS = 2


@dataclass(frozen=True)
class Loading:
    """Settings of the loader, and the mean milliseconds per step of the faster round."""

    num_workers: int
    prefetch_factor: int
    pin_memory: bool
    ms: float


def find(run: Run, *, steps: int, most: int | None, tell: Callable[[Loading], None]) -> list[Loading]:
    """Train some steps with 0, 1, 2, 4, ... workers until more are no faster, then with two other settings and the best number.

    Batches that workers have made ahead before the clock starts are used up first. Each setting is measured twice and the faster counts, since
    other programs only ever make a step slower.

    Args:
        run: Of one process.
        steps: How many are measured.
        most: The most workers; None: as many as this process has cores.
        tell: Is told each setting as it has been measured.
    """
    trial, tried = RepeatedRun(run), list[Loading]()

    def attempt(workers: int, prefetch: int, *, pin: bool) -> Loading:
        took = min(_step_ms(run, trial, steps, workers, prefetch, pin=pin) for _ in range(_ROUNDS))
        tried.append(Loading(workers, prefetch, pin, took))
        tell(tried[-1])
        return tried[-1]

    settings, cuda = run.config.loader, run.strategy.device.type == "cuda"
    prefetch, pin = int(settings.prefetch_factor), bool(settings.pin_memory)
    for workers in _numbers(len(os.sched_getaffinity(0)) if most is None else most):
        attempt(workers, prefetch, pin=pin)
        if len(tried) > 3 and min(one.ms for one in tried[-2:]) > min(one.ms for one in tried[:-2]):
            break
    best = min(tried, key=lambda one: one.ms)
    if best.num_workers:
        attempt(best.num_workers, 2 * prefetch, pin=pin)
        if cuda:
            attempt(best.num_workers, prefetch, pin=not pin)
    return tried


def suggest(tried: list[Loading], *, cuda: bool) -> dict[str, Any]:
    """Choose from the settings measured.

    Returns `num_workers`, `prefetch_factor`, `pin_memory`: the fewest workers, then the least made ahead, among the fastest; `reason`; `tried`.
    """
    fastest, alone = min(one.ms for one in tried), next(one for one in tried if not one.num_workers)
    chosen = min((one for one in tried if one.ms <= (1 + NEAR) * fastest), key=lambda one: (one.num_workers, one.prefetch_factor, one.ms))
    if chosen.num_workers:
        reason = f"a step takes {chosen.ms:.4g} ms with {number_of(chosen.num_workers, 'worker')}, and {alone.ms:.4g} ms without"
    else:
        reason = f"a step takes {alone.ms:.4g} ms without workers, and no other setting makes it faster by more than {NEAR:.0%}"
    reason += "" if cuda else "; loader.pin_memory has no effect on the CPU"
    return {
        "num_workers": chosen.num_workers,
        "prefetch_factor": chosen.prefetch_factor,
        "pin_memory": chosen.pin_memory,
        "ms": chosen.ms,
        "reason": reason,
        "tried": [asdict(one) for one in tried],
    }


def _numbers(most: int) -> Iterator[int]:
    yield 0
    number = 1
    while number < most:
        yield number
        number *= 2
    if most > 0:
        yield most


def _step_ms(run: Run, trial: RepeatedRun, steps: int, workers: int, prefetch: int, *, pin: bool) -> float:
    cfg = run.config.copy()
    cfg.loader.num_workers, cfg.loader.prefetch_factor, cfg.loader.pin_memory = workers, prefetch, pin
    ahead = 2 + -(-workers * prefetch // len(run.strategy.micro_batches))
    still = SetRate(run.schedule, run, lambda step: 0.0)
    took = [seconds for _, seconds in trial.steps(ahead + steps, composed=replace(run.composed, cfg=cfg), schedule=still)]
    return 1000 * sum(took[ahead:]) / steps
