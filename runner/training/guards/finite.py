"""Stops a run at a number that is not finite, before it gets into weights or a checkpoint."""

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
    """Return the names of the tensors that contain NaN or infinity, in order.

    Each process checks its own shard of a sharded tensor.
    """
    values = [
        (name, _local_values(x))
        for name, x in tensors
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    ]
    # One pass over all tensors, which is enough for a sound run
    if math.isfinite(total_norm([x for _, x in values]).item()):
        return []
    return [name for name, x in values if not x.isfinite().all()]


def largest(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the largest magnitude of each gradient, float[], not finite if the gradient is not.

    It tells where a gradient is not finite after the gradient's memory was reused.
    """
    present = [x for x in gradients if x is not None]
    norms = iter(foreach_norm(present, float("inf")) if present else ())
    return [None if x is None else next(norms) for x in gradients]


def require_finite_step(
    run: Run,
    losses: Mapping[str, float],
    norm: float,
    gradients: Sequence[Tensor | None] | None = None,
    explain: Sequence[Callable[[], None]] = (),
) -> None:
    """Raise an error if a phase's loss or gradient is not finite.

    A gradient that overflowed because of float16's loss scale is no error.

    Args:
        run: The run, before the end of the step.
        losses: The phase's losses, by name.
        norm: The 2-norm of its gradients.
        gradients: The `largest` magnitude of each parameter's gradient, in the model's order;
            None: the gradients still exist.
        explain: Functions that raise the recipe's own explanation of a loss that is not finite.

    Raises:
        TrainingError: A number is not finite; with its name, and samples that are not finite.
        SamewiseError: The recipe can explain the loss.
    """
    wrong = next(
        (f"the {name} is" for name, value in losses.items() if not math.isfinite(value)), ""
    )
    if wrong:
        for raise_reason in explain:
            raise_reason()
    if not wrong and not math.isfinite(norm) and not run.precision.may_overflow():
        gradient_values = (
            [parameter.grad for parameter in run.parameters] if gradients is None else gradients
        )
        names = nonfinite_names(
            (name, gradient)
            for (name, _), gradient in zip(
                run.model.named_parameters(), gradient_values, strict=True
            )
        )
        if names:
            wrong = f"the gradient of {names[0]} is"
        # The squares of finite gradients may add up to infinity, which matters to clipping only
        elif run.clip_norm is not None:
            wrong = "the gradient is too large to be clipped: the square of its norm is"
    if wrong and (data := nonfinite_data(run)):
        hint = "check these data: unless the recipe leaves out such numbers, no setting helps"
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
    """Raise a TrainingError if weights or buffers are not finite that were so initially."""
    wrong = [
        name for name in nonfinite_names(run.model.state_dict().items()) if name not in run.infinite
    ]
    if wrong:
        count = f", nor are {len(wrong) - 1} others" if len(wrong) > 1 else ""
        hint = "lower optimizer.lr, warm up, or set clip_norm; any earlier checkpoint is kept"
        message = f"{wrong[0]} is not finite{count}: no checkpoint is written"
        raise TrainingError(
            Problem(f"step {run.step}", message, expected="finite weights and buffers", hint=hint)
        )


def _local_values(tensor: Tensor) -> Tensor:
    values: Tensor = tensor.detach()
    values = values.to_local() if hasattr(values, "to_local") else values  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]  (a DTensor)
    # Torch has no norm for float8
    return values if values.dtype.itemsize > 1 else values.to(torch.float32)
