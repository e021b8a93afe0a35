"""Loads training batches, from a run's current position."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import cache, partial
from typing import final

from samewise.runner.data import streams
from samewise.runner.data.device import Ahead, Prefetcher, copied
from samewise.runner.data.keyed import training_keys
from samewise.runner.data.loading import Loader, MicroBatch
from samewise.runner.interfaces import Batch
from samewise.runner.training.run import Run


@final
class TrainingBatches(Iterator[list[MicroBatch]]):
    """The micro-batches of each step that belong to this process.

    Args:
        run: The run; the first batches are those of its step at the first `next`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        loaded = _load(run)
        self._loaded = Ahead(loaded)
        self.close = loaded.close
        """Ends the workers."""

    def __next__(self) -> list[MicroBatch]:
        step, micro_batches = next(self._loaded)
        self._run.strategy.prepare_step(self._run.plan, step)
        return micro_batches

    def load_next(self) -> None:
        """Load the next step's batches and send them, while a CUDA device computes this step.

        An error in them is raised by the next `next`.
        """
        if self._run.strategy.device.type == "cuda":
            # Without workers, samples are made in this process, whose generators they seed
            with streams.preserve_generators():
                self._loaded.make()


def _load(run: Run) -> Generator[tuple[int, list[MicroBatch]]]:
    """Yield each step's number, from 0, and its micro-batches."""
    is_cuda, steps = run.strategy.device.type == "cuda", range(run.step, run.total_steps)
    send = (
        Prefetcher(run.strategy.device, run.to_device, pin=run.config.loader.pin_memory).send
        if is_cuda
        else None
    )
    own_numbers = run.strategy.micro_batches
    keys = partial(
        training_keys,
        run.order,
        run.plan,
        first_step=steps.start,
        steps=steps.stop,
        micro_batches=own_numbers,
    )
    with closing(
        Loader(run.splits["train"].keyed, keys, run.config.loader, is_cuda=is_cuda)
    ) as loader:
        batches = iter(loader)
        for step in steps:
            # Micro-batches without samples, in an epoch's last step, are not loaded
            numbers = (
                own_numbers
                if run.plan.fills_all
                else [number for number in own_numbers if not run.plan.is_empty(step, number)]
            )
            yield (
                step,
                [
                    MicroBatch(number, batch, _sent(run, batch, send))
                    for number, batch in zip(numbers, batches, strict=False)
                ],
            )


def _sent(
    run: Run, batch: Batch, send: Callable[[Batch], Callable[[], Batch]] | None
) -> Callable[[], Batch] | None:
    """Return a function that returns the batch on the device."""
    sent = send(batch) if send else None
    if len(run.phases) == run.phases[0].spec.times == 1:
        return sent
    # Each of several phases gets a copy, since a recipe may change a batch in place
    once = cache(sent or partial(run.to_device, batch))
    return lambda: copied(once())
