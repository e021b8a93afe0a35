"""Stops a run at a non-finite number, before it gets into the weights or a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import Problem, TrainingError
from samewise.runner.optim.gradients import total_norm
from samewise.runner.torch_private import foreach_norm
from samewise.runner.training.guards.step_errors import nonfinite_data
from samewise.runner.training.run import Run


def nonfinite_names(tensors: Iterable[tuple[str, Any]]) -> list[str]:
    """The names of the tensors that contain NaN or infinity, in order.

    Each process checks its own shard of a sharded one.
    """
    known = [
        (name, _local_values(one))
        for name, one in tensors
        if isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex())
    ]
    if math.isfinite(
        total_norm([one for _, one in known]).item()
    ):  # one pass over all tensors; the rest runs only if this is not finite
        return []
    return [name for name, one in known if not one.isfinite().all()]


def largest(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The largest magnitude of each gradient, float[], non-finite if the gradient is: kept when the
    gradient's memory is reused.
    """
    held = [one for one in gradients if one is not None]
    norms = iter(foreach_norm(held, float("inf")) if held else ())
    return [None if one is None else next(norms) for one in gradients]


def require_finite_step(
    run: Run,
    losses: Mapping[str, float],
    norm: float,
    gradients: Sequence[Tensor | None] | None = None,
    explain: Sequence[Callable[[], None]] = (),
) -> None:
    """Raise an error before the step's last optimizer steps if a loss is not finite, or a gradient
    for another reason than float16's loss scale.

    TrainingError with the name of the first that is not finite, and samples if the data are not;
    SamewiseError if the recipe knows why a loss is not finite.

    Args:
        run: It is at the step.
        losses: Of a phase, by name.
        norm: Its gradients' 2-norm.
        gradients: What `largest` made of those of all of the model's parameters, in order; None:
            those that are there.
        explain: Each raises what a recipe knows of a loss that is not finite.
    """
    wrong = next(
        (f"the {name} is" for name, value in losses.items() if not math.isfinite(value)), ""
    )
    if wrong:
        for one in explain:
            one()
    if not wrong and not math.isfinite(norm) and not run.precision.may_overflow():
        held = [one.grad for one in run.parameters] if gradients is None else gradients
        names = nonfinite_names(
            (name, gradient)
            for (name, _), gradient in zip(run.model.named_parameters(), held, strict=True)
        )
        if names:
            wrong = f"the gradient of {names[0]} is"
        elif run.clip_norm is not None:
            wrong = "the gradient is too large to be clipped: the square of its norm is"
    if wrong and (data := nonfinite_data(run)):
        hint = (
            "check the data there: unless the recipe leaves such numbers out, no other setting "
            "helps"
        )
        raise TrainingError(
            Problem(
                f"step {run.step + 1}",
                f"{wrong} not finite, nor is {data}",
                expected="finite numbers",
                hint=hint,
            )
        )
    if wrong:
        rates = ", ".join(f"{rate:g}" for rate in run.learning_rates())
        message = f"{wrong} not finite; the learning rate was {rates}, the gradient's norm {norm:g}"
        hint = (
            "lower optimizer.lr, warm up, or set clip_norm; any checkpoint from before this "
            "step is kept"
        )
        raise TrainingError(
            Problem(f"step {run.step + 1}", message, expected="a finite number", hint=hint)
        )


def require_finite_model(run: Run) -> None:
    """Raise a TrainingError before a checkpoint if weights or buffers are no longer finite.

    Initial infinities (a mask) may stay.
    """
    wrong = [
        name for name in nonfinite_names(run.model.state_dict().items()) if name not in run.infinite
    ]
    if wrong:
        others = f", nor are {len(wrong) - 1} others" if len(wrong) > 1 else ""
        hint = "lower optimizer.lr, warm up, or set clip_norm; any earlier checkpoint is kept"
        message = f"{wrong[0]} is not finite{others}: no checkpoint is written"
        raise TrainingError(
            Problem(f"step {run.step}", message, expected="finite weights and buffers", hint=hint)
        )


def _local_values(tensor: Tensor) -> Tensor:
    mine: Tensor = tensor.detach()
    mine = mine.to_local() if hasattr(mine, "to_local") else mine  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]  (a DTensor)
    return mine if mine.dtype.itemsize > 1 else mine.to(torch.float32)
