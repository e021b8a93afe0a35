"""The batches of training, from wherever a run stands."""

from __future__ import annotations

from collections.abc import Iterator

from samewise.runner.data.loading import Loader, MicroBatch, training_keys
from samewise.runner.training.run import Run


def training_batches(run: Run) -> Iterator[list[MicroBatch]]:
    """Each step's micro-batches that this process carries."""
    mine, first, settings = run.strategy.micro_batches, run.step, run.config.loader
    loader = Loader(
        run.splits["train"].keyed,
        lambda: training_keys(run.order, run.plan, first_step=first, steps=run.total_steps, micro_batches=mine),
        num_workers=settings.num_workers,
        prefetch_factor=settings.prefetch_factor,
        pin_memory=settings.pin_memory and run.strategy.device.type == "cuda",
    )
    loaded = iter(loader)
    for step in range(first, run.total_steps):
        run.strategy.coming(run.plan, step)
        yield [MicroBatch(number, next(loaded)) for number in mine if not run.plan.is_empty(step, number)]
