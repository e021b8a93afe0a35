"""The memory that each part of a step takes, and what to do if there is not enough."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from samewise.runner.data import streams
from samewise.runner.data.device import copied
from samewise.runner.data.keyed import Key
from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import Problem, requested_memory
from samewise.runner.records.digest import tensors_in
from samewise.runner.strategies.tree import unchanged_buffers
from samewise.runner.training.losses import loss_of
from samewise.runner.training.run import Run

PARTS = ("weights", "gradients", "optimizer state", "averages", "activations", "batch")
"""What a process holds during a step: averages are kept by callbacks, activations by the forward
pass for the backward pass."""
_FEW = 2
"""The number of samples from which activations are estimated after memory has run out."""


def parts_of(run: Run, *, samples: int | None = None) -> dict[str, int]:
    """Bytes by part of `PARTS` in this process, between steps or after a failed one, without parts
    that are unknown.

    Activations and batch are measured of so many samples, the rest in proportion; None: of a
    micro-batch; 0: of none, so they stay unknown.
    """
    trained = [one for one in run.parameters if one.requires_grad]
    buffers = run.strategy.buffer_bytes()  # of which, after a step, gradients are views
    found = {
        "weights": size_of(run.model.state_dict(keep_vars=True).values()),
        "gradients": buffers
        + size_of(one if buffers or one.grad is None else one.grad for one in trained),
        "optimizer state": sum(_state_of(phase.optimizer) for phase in run.phases),
        "averages": size_of(
            one
            for callback in run.callbacks.values()
            for model in callback.models().values()
            for one in model.state_dict().values()
        ),
    }
    whole = micro_batch_size(run)
    some = whole if samples is None else min(samples, whole)
    with contextlib.suppress(
        Exception
    ):  # a model may refuse so few samples, or even they may need too much memory
        kept, batch = _forward(run, some) if some else (0, 0)
        found |= {"activations": kept * whole // some, "batch": batch * whole // some}
    return found


def micro_batch_size(run: Run) -> int:
    """The largest number of samples in a forward pass of training."""
    return ceil(run.batch_size / run.micro_batches)


def size_of(values: Iterable[Any]) -> int:
    """The bytes of tensors, counting each storage once; of a sharded one this process's shard."""
    storages = dict[int, int]()
    for value in values:
        for tensor in tensors_in(value):
            mine: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]
            storage = mine.untyped_storage()
            storages[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(storages.values())


def out_of_memory(run: Run, error: BaseException) -> Problem | None:
    """The problem for an allocator's error: how much each part of a step takes, and which setting
    takes less. None for other errors.
    """
    asked = requested_memory(error)
    if not asked:
        return None
    where = f"step {run.step + 1}" if run.step else "batch_size, model"
    if not any(
        frame.f_code.co_name == "train_step" for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        return Problem(
            where if run.step else "evaluate.batch_size, model",
            f"an evaluation {asked}",
            hint="a smaller evaluate.batch_size, or a smaller model",
        )
    asked = asked if run.step else f"the first step {asked}"
    traceback.clear_frames(error.__traceback__)  # free what the failed step holds
    # A forward pass on one rank would wait for the others
    found = parts_of(run, samples=_FEW if run.strategy.peers.size == 1 else 0)
    takes = ", ".join(f"{name} {format_bytes(found[name])}" for name in PARTS if found.get(name))
    estimated = (
        f"estimated from {_FEW} samples for {micro_batch_size(run)}"
        if "activations" in found
        else "activations could not be estimated"
    )
    return Problem(where, f"{asked}. A step takes: {takes} ({estimated})", hint=_hint(run, found))


def format_bytes(size: float) -> str:
    """Bytes in a suitable unit: `1.5 GB`, by powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def _state_of(optimizer: Optimizer) -> int:
    """The bytes of an optimizer's state.

    Before its first step an estimate from a small parameter.
    """
    held = size_of(value for state in optimizer.state.values() for value in state.values())
    parameters = [
        one for group in optimizer.param_groups for one in group["params"] if one.requires_grad
    ]
    if held or not parameters:
        return held
    try:
        small = torch.zeros(64, 64, device=parameters[0].device, requires_grad=True)
        small.grad = torch.zeros_like(small)
        like: Any = type(optimizer)
        one = like([small], **optimizer.defaults)
        one.step()
    except Exception:  # a user's class may need other arguments
        return 0
    # Without the number of steps
    share = round(size_of(one.state[small].values()) / small.nbytes, 2)
    return round(share * size_of(parameters))


def _forward(run: Run, samples: int) -> tuple[int, int]:
    """The bytes that a forward pass of the first samples keeps for its backward pass, and those of
    its batch. The run is not changed.
    """
    epoch, start, _ = run.plan.bounds(0, run.strategy.micro_batches[0])
    loaded: Any = run.splits["train"].keyed[
        Key(epoch, start, tuple(run.order.indices(epoch)[start : start + samples].tolist()))
    ]
    most, held = 0, 0
    with streams.preserve_generators(), unchanged_buffers(run.model):
        for phase in run.phases:
            kept = dict[int, int]()

            def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            with phase.training(run.step), saved_tensors_hooks(keep, lambda tensor: tensor):
                batch, loss = loss_of(run, phase, MicroBatch(0, copied(loaded)), model=run.model)
            for tensor in tensors_in([batch, *run.model.state_dict(keep_vars=True).values()]):
                kept.pop(tensor.untyped_storage().data_ptr(), None)
            most, held = max(most, sum(kept.values())), max(held, size_of([batch]))
            # Until here the graph has held the saved tensors, so that no address was reused
            del loss
    return most, held


def _hint(run: Run, found: Mapping[str, int]) -> str:
    """What takes less memory, for the largest part first."""
    held = sum(
        found.get(name, 0) for name in ("weights", "gradients", "optimizer state", "averages")
    )
    ways, micro = list[str](), micro_batch_size(run)
    if micro > 1:
        ways.append(
            f"batch_size={run.batch_size // 2}, or "
            f"accumulate={2 * int(run.config.accumulate)}: half the activations at a time"
        )
    if run.strategy.device.type == "cuda" and run.config.precision.get("dtype") == "float32":
        ways.append("precision=bf16: activations of half the size")
    if not run.config.activation_checkpointing:
        blocks = Counter(
            type(one).__name__
            for one in run.model.modules()
            if any(one.children()) and not isinstance(one, nn.Sequential | nn.ModuleList)
        )
        often = [name for name, count in blocks.most_common(1) if count > 1]
        ways.append(
            f"activation_checkpointing=[{often[0] if often else 'MODULE'}]: activations "
            "computed again instead of kept, the same bits"
        )
    of_model = (
        "strategy=fsdp: weights, gradients and optimizer state in shards over several devices"
    )
    return "; ".join(
        [of_model, *ways] if held > found.get("activations", held) else [*ways, of_model]
    )
