"""Find the batch size that fits into memory, and the one that is fastest per sample."""

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

# A process that takes more than there is ends without a message
_SHARE = 0.8
"""Share of free memory that a step may take on the CPU."""


@dataclass(frozen=True)
class Size:
    """A batch size that was tried.

    Args:
        batch_size: Samples of a step.
        ms: Milliseconds of a step; None if the batch did not fit.
        bytes: Peak memory of the process so far, on CUDA of the device.
        why: Why the batch did not fit.
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
    run: Run, *, steps: int, largest: bool, memory: int | None, report: Callable[[Size], None]
) -> list[Size]:
    """Try doubled batch sizes until one does not fit or is no faster.

    Args:
        run: Run of a single process.
        steps: Number of steps to measure for each size.
        largest: Go on until a size does not fit, then search between the last two.
        memory: Most bytes to take; None: on CUDA all, else 0.8 of what is free.
        report: Called with each size as it has been tried.

    Returns:
        All sizes that were tried, by size.
    """
    trial, unit = RepeatedRun(run), run.micro_batches
    max_samples = run.plan.samples
    bound = (
        memory
        if memory is not None or run.strategy.device.type == "cuda"
        else memory_in_use() + round(_SHARE * free_memory())
    )
    results = dict[int, Size]()

    def attempt(size: int) -> Size:
        result = _skip_too_large(size, results, bound) or _try_size(run, trial, size, steps)
        if bound is not None and result.bytes > bound:
            result = Size(
                size,
                None,
                result.bytes,
                f"took {format_bytes(result.bytes)}, more than the bound of {format_bytes(bound)}",
            )
        results[size] = result
        report(result)
        return result

    size = min(unit * max(1, 8 // unit), max_samples // unit * unit)
    while (
        size
        and attempt(size).fits
        and 2 * size <= max_samples
        and (largest or not _stalls(list(results.values())))
    ):
        size *= 2
    largest_fit = max((x.batch_size for x in results.values() if x.fits), default=0)
    smallest_failure = min((x.batch_size for x in results.values() if not x.fits), default=0)
    while smallest_failure and smallest_failure - largest_fit > max(unit, largest_fit // 8):
        middle = (largest_fit + smallest_failure) // 2 // unit * unit
        if middle in (largest_fit, smallest_failure):
            break
        largest_fit, smallest_failure = (
            (middle, smallest_failure) if attempt(middle).fits else (largest_fit, middle)
        )
    return [results[size] for size in sorted(results)]


def suggest(sizes: list[Size], *, samples: int) -> dict[str, Any]:
    """Choose from the sizes tried.

    Raises:
        TrainingError: No size fits.
    """
    fitting = [x for x in sizes if x.fits]
    if not fitting:
        raise TrainingError(
            Problem(
                "tune batch_size",
                f"no batch fits: {sizes[0].why if sizes else 'there are too few samples'}",
                hint="a smaller model",
            )
        )
    fastest = min(fitting, key=lambda x: x.per_sample)
    choice = next(x for x in fitting if x.per_sample <= (1 + NEAR) * fastest.per_sample)
    failure = next((x for x in sizes if not x.fits), None)
    epoch = max(1, samples // choice.batch_size)
    reason = (
        f"{choice.per_sample:.3g} ms a sample, the least there is within {NEAR:.0%}, and "
        "larger batches make fewer steps of the same samples"
    )
    reason += f": here {epoch:,} step{'s' * (epoch > 1)} an epoch of {samples:,}"
    reason += (
        "; twice as many are more than the training split has"
        if not failure and 2 * fitting[-1].batch_size > samples
        else ""
    )
    reason += (
        f"; the largest that fits is {fitting[-1].batch_size}: {failure.batch_size} {failure.why}"
        if failure
        else ""
    )
    return {
        "batch_size": choice.batch_size,
        "reason": reason,
        "fastest": fastest.batch_size,
        "largest": fitting[-1].batch_size,
        "is_largest": failure is not None,
        "samples_per_s": 1000 / choice.per_sample,
        "tried": [asdict(x) for x in sizes],
    }


def _stalls(sizes: list[Size]) -> bool:
    """Whether the last two doublings have not made samples faster."""
    best = [min(x.per_sample for x in sizes[:end]) for end in range(1, len(sizes) + 1)]
    return len(best) > 3 and best[-1] > (1 - NEAR) * best[-3]


def _try_size(run: Run, trial: RepeatedRun, size: int, steps: int) -> Size:
    """Measure some steps with a batch size."""
    is_cuda = run.strategy.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        # Weights stay as they are, whatever the size
        schedule = SetRate(run.schedule, run, lambda step: 0.0)
        durations = [
            seconds
            for _, seconds in trial.steps(
                1 + steps,
                plan=replace(run.plan, batch_size=size, drop_last=True),
                batch_size=size,
                schedule=schedule,
            )
        ]
    except (RuntimeError, MemoryError) as error:
        reason = requested_memory(error)
        if not reason:
            raise
        # The frames hold tensors of the failed step
        traceback.clear_frames(error.__traceback__)
        return Size(size, None, memory_in_use(), reason)
    finally:
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    return Size(
        size,
        # The first step also makes buffers and chooses kernels
        1000 * median(durations[1:]),
        torch.cuda.max_memory_allocated() if is_cuda else memory_in_use(),
    )


def _skip_too_large(size: int, results: dict[int, Size], bound: int | None) -> Size | None:
    """Return a size, untried, that would exceed the bound by the memory of smaller ones."""
    fitting = sorted((x for x in results.values() if x.fits), key=lambda x: x.batch_size)
    # Trying such a size could end the process without a message
    if bound is None or len(fitting) < 2 or size < fitting[-1].batch_size:
        return None
    last, previous = fitting[-1], fitting[-2]
    expected = last.bytes + (last.bytes - previous.bytes) * (size - last.batch_size) // (
        last.batch_size - previous.batch_size
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
    """Return the peak memory of this process so far, in bytes."""
    # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
