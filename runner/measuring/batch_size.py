"""Finds the batch size that fits into memory, and the one that is fastest per sample."""

from __future__ import annotations

import gc
import resource
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from samewise.runner.errors import Problem, TrainingError, requested_memory
from samewise.runner.measuring.repeated_run import NEAR, RepeatedRun, SetRate
from samewise.runner.processes.memory import free_memory
from samewise.runner.training.guards.memory import format_bytes
from samewise.runner.training.run import Run

_SHARE = 0.8
"""The share of free memory that a step may take on the CPU, where exceeding it ends the process
without a message."""


@dataclass(frozen=True)
class Size:
    """A batch size that was tried.

    Args:
        batch_size: Samples of a step.
        ms: Milliseconds of a step; None: it did not fit.
        bytes: The most memory that the process had taken by then, on CUDA of the device.
        why: Why it did not fit.
    """

    batch_size: int
    ms: float | None = None
    bytes: int = 0
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether a step succeeded."""
        return self.ms is not None

    @property
    def per_sample(self) -> float:
        """Milliseconds per sample."""
        assert self.ms is not None
        return self.ms / self.batch_size


def find(
    run: Run, *, steps: int, largest: bool, memory: int | None, tell: Callable[[Size], None]
) -> list[Size]:
    """Try doubled batch sizes until one does not fit or is no faster.

    With `largest`, until one does not fit, then between the last two.

    The learning rate is 0: weights stay as they are, whatever the size. Returns all that were
    tried, by size.

    Args:
        run: Of one process.
        steps: How many are measured of each size.
        largest: Go on until memory ends.
        memory: The most bytes that may be taken; None: on CUDA all, else 0.8 of what is free.
        tell: Is told each size as it has been tried.
    """
    trial, unit = RepeatedRun(run), run.micro_batches
    most = run.plan.samples
    bound = (
        memory
        if memory is not None or run.strategy.device.type == "cuda"
        else memory_in_use() + round(_SHARE * free_memory())
    )
    tried = dict[int, Size]()

    def attempt(size: int) -> Size:
        one = _skip_too_large(size, tried, bound) or _try_size(run, trial, size, steps)
        if bound is not None and one.bytes > bound:
            one = Size(
                size,
                None,
                one.bytes,
                f"took {format_bytes(one.bytes)}, more than the bound of {format_bytes(bound)}",
            )
        tried[size] = one
        tell(one)
        return one

    size = min(unit * max(1, 8 // unit), most // unit * unit)
    while (
        size
        and attempt(size).fits
        and 2 * size <= most
        and (largest or not _stalls(list(tried.values())))
    ):
        size *= 2
    fit = max((one.batch_size for one in tried.values() if one.fits), default=0)
    failed = min((one.batch_size for one in tried.values() if not one.fits), default=0)
    while failed and failed - fit > max(unit, fit // 8):
        middle = (fit + failed) // 2 // unit * unit
        if middle in (fit, failed):
            break
        fit, failed = (middle, failed) if attempt(middle).fits else (fit, middle)
    return [tried[size] for size in sorted(tried)]


def suggest(tried: list[Size], *, samples: int) -> dict[str, Any]:
    """Choose from the sizes tried; a TrainingError if none fits."""
    fits = [one for one in tried if one.fits]
    if not fits:
        raise TrainingError(
            Problem(
                "tune batch_size",
                f"no batch fits: {tried[0].why if tried else 'there are too few samples'}",
                hint="a smaller model",
            )
        )
    fastest = min(fits, key=lambda one: one.per_sample)
    chosen = next(one for one in fits if one.per_sample <= (1 + NEAR) * fastest.per_sample)
    refused = next((one for one in tried if not one.fits), None)
    epoch = max(1, samples // chosen.batch_size)
    reason = (
        f"{chosen.per_sample:.3g} ms a sample, the least there is within {NEAR:.0%}, and "
        "larger batches make fewer steps of the same samples"
    )
    reason += f": here {epoch:,} step{'s' * (epoch > 1)} an epoch of {samples:,}"
    reason += (
        "; twice as many are more than the training split has"
        if not refused and 2 * fits[-1].batch_size > samples
        else ""
    )
    reason += (
        f"; the largest that fits is {fits[-1].batch_size}: {refused.batch_size} {refused.why}"
        if refused
        else ""
    )
    return {
        "batch_size": chosen.batch_size,
        "reason": reason,
        "fastest": fastest.batch_size,
        "largest": fits[-1].batch_size,
        "is_largest": refused is not None,
        "samples_per_s": 1000 / chosen.per_sample,
        "tried": [asdict(one) for one in tried],
    }


def _stalls(tried: list[Size]) -> bool:
    """Whether the last two doublings have not made samples faster."""
    best = [min(one.per_sample for one in tried[:end]) for end in range(1, len(tried) + 1)]
    return len(best) > 3 and best[-1] > (1 - NEAR) * best[-3]


def _try_size(run: Run, trial: RepeatedRun, size: int, steps: int) -> Size:
    cuda = run.strategy.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        still = SetRate(run.schedule, run, lambda step: 0.0)
        took = [
            seconds
            for _, seconds in trial.steps(
                1 + steps,
                plan=replace(run.plan, batch_size=size, drop_last=True),
                batch_size=size,
                schedule=still,
            )
        ]
    except (RuntimeError, MemoryError) as error:
        asked = requested_memory(error)
        if not asked:
            raise
        traceback.clear_frames(error.__traceback__)
        return Size(size, None, memory_in_use(), asked)
    finally:
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    return Size(
        size,
        1000 * median(took[1:]),
        torch.cuda.max_memory_allocated() if cuda else memory_in_use(),
    )


def _skip_too_large(size: int, tried: dict[int, Size], bound: int | None) -> Size | None:
    """A size that would exceed the bound, extrapolated from the memory so far, and is not tried."""
    fits = sorted((one for one in tried.values() if one.fits), key=lambda one: one.batch_size)
    if bound is None or len(fits) < 2 or size < fits[-1].batch_size:
        return None
    last, before = fits[-1], fits[-2]
    expected = last.bytes + (last.bytes - before.bytes) * (size - last.batch_size) // (
        last.batch_size - before.batch_size
    )
    if expected <= bound:
        return None
    return Size(
        size,
        None,
        expected,
        f"would take {format_bytes(expected)}, more than the bound of {format_bytes(bound)}",
    )


def memory_in_use() -> int:
    """The peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
