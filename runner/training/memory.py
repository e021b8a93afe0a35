"""Measures the memory of each part of a step, and advises where there is not enough."""

import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import ceil
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from samewise.runner.data import streams
from samewise.runner.data.device import copied
from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, requested_memory
from samewise.runner.records.checkpoint_writer import is_copied
from samewise.runner.records.digest import tensors_in
from samewise.runner.strategies.layout import Layout
from samewise.runner.strategies.tree import unchanged_buffers
from samewise.runner.training.losses import first_samples, loss_of
from samewise.runner.training.run import Run

PARTS = ("weights", "gradients", "optimizer state", "averages", "activations", "batch")
"""The parts of a process's memory in a step: callbacks keep averages; the forward pass keeps
activations for the backward pass."""


def parts_of(run: Run) -> dict[str, int]:
    """Measure the bytes of `PARTS` that last between steps, in this process, after a step."""
    trained = [x for x in run.parameters if x.requires_grad]
    # After a step, gradients are views of the strategy's buffers
    buffers = run.strategy.buffer_bytes()
    averaging = [model for x in run.callbacks.values() for model in x.models().values()]
    return {
        "weights": size_of(run.model.state_dict(keep_vars=True).values()),
        "gradients": buffers + size_of(x if buffers or x.grad is None else x.grad for x in trained),
        "optimizer state": size_of(
            value
            for phase in run.phases
            for values in phase.optimizer.state.values()
            for value in values.values()
        ),
        "averages": size_of(x for model in averaging for x in model.state_dict().values()),
    }


def checkpoint_of(run: Run) -> dict[str, int]:
    """Measure the bytes of a checkpoint on disk and of the copy that writing it takes, after a step.

    Empty if other processes hold a part of it.
    """
    if type(run.strategy.layout) is not Layout:
        return {}
    states = [
        run.model.state_dict(),
        *(phase.optimizer.state for phase in run.phases),
        *(callback.state_dict() for callback in run.callbacks.values()),
    ]
    disk, copied = size_of(states), run.checkpoint.background and is_copied(states)
    return {"disk": disk, "memory": disk if copied else 0}


def checkpoint_lines(sizes: Mapping[str, int]) -> list[str]:
    """Describe the sizes from `checkpoint_of` in a line."""
    places = {"disk": "on disk", "memory": "of memory for its copy"}
    text = ", ".join(f"{format_bytes(sizes[name])} {places[name]}" for name in sizes)
    return [f"a checkpoint: {text}"] if sizes else []


def size_of(values: Iterable[Any]) -> int:
    """Return the bytes of tensors, each storage once; of a sharded tensor, of this shard."""
    storages = dict[int, int]()
    for value in values:
        for tensor in tensors_in(value):
            local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]
            storage = local.untyped_storage()
            # Storages without memory, such as the meta device's, have the address 0
            storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def out_of_memory(run: Run, error: BaseException) -> Problem | None:
    """Explain an allocator's error, with settings that need less; None for other errors."""
    requested = requested_memory(error)
    if not requested:
        return None
    where = f"step {run.step + 1}" if run.step else "batch_size, model"
    if not any(
        frame.f_code.co_name == "train_step" for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        return Problem(
            where if run.step else "evaluate.batch_size, model",
            f"an evaluation {requested}",
            hint="a smaller evaluate.batch_size, or a smaller model",
        )
    requested = requested if run.step else f"the first step {requested}"
    ways = [
        f"batch_size={run.batch_size // 2}, or accumulate={2 * int(run.config.accumulate)}: half "
        "the activations at a time",
        "precision=bf16",
        "activation_checkpointing=[MODULE]: activations computed again, the same bits",
        "strategy=fsdp: weights, gradients and optimizer state in shards over several devices",
    ]
    return Problem(where, requested, hint="; ".join(ways))


def format_bytes(size: float) -> str:
    """Format bytes in a suitable unit, by powers of ten: `1.5 GB`."""
    return next(
        (
            f"{size / x:.3g} {unit}"
            for unit, x in ((("GB", 1e9), ("MB", 1e6), ("kB", 1e3)))
            if size >= x
        ),
        f"{size:.0f} B",
    )


def activations_of(run: Run) -> dict[str, int]:
    """Measure the bytes that a forward pass keeps for its backward pass, and those of its batch.

    Empty where the micro-batch is too large for the memory.
    """
    with suppress(Exception):
        activations, batch = _forward(
            run, run.strategy.at_once * ceil(run.batch_size / run.micro_batches)
        )
        return {"activations": activations, "batch": batch}
    return {}


def _forward(run: Run, samples: int) -> tuple[int, int]:
    loaded = first_samples(run, samples)
    most, batch_bytes = 0, 0
    with streams.preserve_generators(), unchanged_buffers(run.model):
        for phase in run.phases:
            storages = dict[int, int]()

            def keep(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
                return tensor

            with phase.training(run.step), saved_tensors_hooks(keep, lambda tensor: tensor):
                batch, loss = loss_of(run, phase, MicroBatch(0, copied(loaded)), model=run.model)
            # Batch and weights, which autograd saves too, are counted as parts of their own
            for tensor in tensors_in([batch, *run.model.state_dict(keep_vars=True).values()]):
                storages.pop(tensor.untyped_storage().data_ptr(), None)
            most, batch_bytes = (
                max(most, sum(storages.values())),
                max(batch_bytes, size_of([batch])),
            )
            # Only now: while the graph holds the saved tensors, no address is reused
            del loss
    return most, batch_bytes
