"""Finds the loader's settings that make steps fastest."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from samewise.runner.errors import number_of
from samewise.runner.measuring.repeated_run import NEAR, RepeatedRun, SetRate
from samewise.runner.training.run import Run

_ROUNDS = 4


Settings = tuple[int, int, bool]
"""num_workers, prefetch_factor and pin_memory."""


@dataclass(frozen=True)
class Loading:
    """Settings of the loader, and the mean milliseconds per step of the fastest and the slowest round."""

    num_workers: int
    prefetch_factor: int
    pin_memory: bool
    ms: float
    slowest: float

    @property
    def range(self) -> str:
        """Both, as text."""
        return f"{self.ms:.4g} to {self.slowest:.4g} ms"

    @property
    def settings(self) -> Settings:
        """What was measured."""
        return self.num_workers, self.prefetch_factor, self.pin_memory


def settings_of(run: Run) -> Settings:
    """The run's own settings."""
    return int(run.config.loader.num_workers), int(run.config.loader.prefetch_factor), bool(run.config.loader.pin_memory)


def find(run: Run, *, steps: int, most: int | None, tell: Callable[[int, int], None]) -> list[Loading]:
    """Train some steps with 0, 1, 2, 4, ... workers until more are no faster, then with two other settings and the best number; then repeat all in turns.

    Batches that workers have made ahead before the clock starts are used up first. The fastest round of a setting counts, since other programs only ever
    make a step slower; they do so for all settings alike if these take turns, forwards and backwards.

    Args:
        run: Of one process.
        steps: How many are measured of each setting in two rounds.
        most: The most workers; None: as many as this process has cores.
        tell: Is told each round's number before it begins, and how many there are.
    """
    trial, took = RepeatedRun(run), dict[Settings, list[float]]()

    def attempt(setting: Settings) -> None:
        took.setdefault(setting, []).append(_step_ms(run, trial, -(-steps // 2), setting))

    tell(1, _ROUNDS)
    own, prefetch, pin = settings_of(run)
    for workers in _numbers(len(os.sched_getaffinity(0)) if most is None else most, own):
        attempt((workers, prefetch, pin))
        if len(took) > 3 and min(list(took.values())[-2:]) > min(list(took.values())[:-2]):
            break
    best = min(took, key=lambda setting: took[setting])[0]
    if best:
        attempt((best, 2 * prefetch, pin))
        if run.strategy.device.type == "cuda":
            attempt((best, prefetch, not pin))
    for number in range(2, _ROUNDS + 1):
        tell(number, _ROUNDS)
        for setting in list(took) if number % 2 else reversed(list(took)):
            attempt(setting)
    return [Loading(*setting, ms=min(each), slowest=max(each)) for setting, each in took.items()]


def suggest(tried: list[Loading], *, cuda: bool, own: Settings) -> dict[str, Any]:
    """Choose from the settings measured: the run's `own`, if they are as fast as the fastest within what its rounds differ by.

    Returns `num_workers`, `prefetch_factor`, `pin_memory`: the fewest workers, then the least made ahead, among the fastest; `reason`; `tried`.
    """
    fastest, alone = min(tried, key=lambda one: one.ms), next(one for one in tried if not one.num_workers)
    near, scatters = (1 + NEAR) * fastest.ms, fastest.slowest > (1 + NEAR) * fastest.ms
    fast = [one for one in tried if one.ms <= max(near, fastest.slowest)]
    chosen = min(fast, key=lambda one: (one.num_workers, one.prefetch_factor, one.ms))
    if scatters and (kept := next((one for one in fast if one.settings == own), None)):
        chosen = kept
    if scatters and chosen is not fastest:
        others = f"num_workers={fastest.num_workers} prefetch_factor={fastest.prefetch_factor}"
        reason = f"a step takes {chosen.range}; {fastest.range} with {others}, the fastest, whose rounds differ by more than this would save"
    elif chosen.num_workers:
        reason = f"a step takes {chosen.range} with {number_of(chosen.num_workers, 'worker')}, and {alone.range} without"
    else:
        reason = f"a step takes {alone.range} without workers, and no other setting makes it faster by more than {NEAR:.0%}"
    reason += "" if cuda else "; loader.pin_memory has no effect on the CPU"
    return {
        "num_workers": chosen.num_workers,
        "prefetch_factor": chosen.prefetch_factor,
        "pin_memory": chosen.pin_memory,
        "ms": chosen.ms,
        "reason": reason,
        "tried": [asdict(one) for one in tried],
    }


def _numbers(most: int, own: int) -> list[int]:
    """0, 1, 2, 4, ... up to the most, and the run's own number."""
    doubled = [2**power for power in range(most.bit_length()) if 2**power < most]
    return sorted({0, *doubled, most, min(own, most)})


def _step_ms(run: Run, trial: RepeatedRun, steps: int, setting: Settings) -> float:
    cfg, (workers, prefetch, _) = run.config.copy(), setting
    cfg.loader.num_workers, cfg.loader.prefetch_factor, cfg.loader.pin_memory = setting
    ahead = 2 + -(-workers * prefetch // len(run.strategy.micro_batches))
    still = SetRate(run.schedule, run, lambda step: 0.0)
    took = [seconds for _, seconds in trial.steps(ahead + steps, composed=replace(run.composed, cfg=cfg), schedule=still)]
    return 1000 * sum(took[ahead:]) / steps
