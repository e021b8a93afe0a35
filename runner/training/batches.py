"""Training batches, from a run's current position."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import cache, partial

from samewise.runner.data.device import Prefetcher, copied, prefetch_one
from samewise.runner.data.keyed import training_keys
from samewise.runner.data.loading import Loader, MicroBatch
from samewise.runner.interfaces import Batch
from samewise.runner.training.run import Run


def training_batches(run: Run) -> Generator[list[MicroBatch]]:
    """The micro-batches of each step that belong to this process.

    On CUDA, the next step's are sent to the device in advance. Closing it ends the workers.
    """
    is_cuda, steps = run.strategy.device.type == "cuda", range(run.step, run.total_steps)
    send = (
        Prefetcher(run.strategy.device, run.to_device, pin=run.config.loader.pin_memory).send
        if is_cuda
        else None
    )
    keys = partial(
        training_keys,
        run.order,
        run.plan,
        first_step=steps.start,
        steps=steps.stop,
        micro_batches=run.strategy.micro_batches,
    )
    with closing(
        Loader(run.splits["train"].keyed, keys, run.config.loader, is_cuda=is_cuda)
    ) as loader:
        loaded = _load(run, steps, iter(loader), send)
        for step, micro_batches in zip(
            steps, prefetch_one(loaded) if is_cuda else loaded, strict=True
        ):
            run.strategy.coming(run.plan, step)
            yield micro_batches


def _load(
    run: Run,
    steps: range,
    batches: Iterator[Batch],
    send: Callable[[Batch], Callable[[], Batch]] | None,
) -> Iterator[list[MicroBatch]]:
    mine = run.strategy.micro_batches
    for step in steps:
        numbers = (
            mine
            if run.plan.fills_all
            else [number for number in mine if not run.plan.is_empty(step, number)]
        )
        yield [
            MicroBatch(number, batch, _sent(run, batch, send))
            for number, batch in zip(numbers, batches, strict=False)
        ]


def _sent(
    run: Run, batch: Batch, send: Callable[[Batch], Callable[[], Batch]] | None
) -> Callable[[], Batch] | None:
    """What returns a batch on the device: each of several phases gets a copy, since it may change
    it in place.
    """
    sent = send(batch) if send else None
    if len(run.phases) == 1:
        return sent
    once = cache(sent or partial(run.to_device, batch))
    return lambda: copied(once())
