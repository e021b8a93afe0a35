"""Stops a run at a number that is not finite, before it gets into weights or a checkpoint."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from samewise.runner.errors import Problem, TrainingError
from samewise.runner.optim.gradients import total_norm
from samewise.runner.torch_private import foreach_norm
from samewise.runner.training.failures import nonfinite_data
from samewise.runner.training.run import Caution, Guard, Numbers, Run

_SMALLER_STEPS = "lower optimizer.lr, warm up, or set clip_norm"


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


@final
class FiniteNumbers(Guard):
    """Requires finite losses, gradients, weights and buffers.

    A gradient that overflowed because of float16's loss scale is no error, and a tensor may stay
    not finite that was so from the start, such as a mask.
    """

    def __init__(self, run: Run) -> None:
        self._infinite = {*nonfinite_names(run.model.state_dict().items())}

    def on_numbers(self, run: Run, numbers: Numbers) -> Iterable[Caution]:
        """Raise an error if a phase's loss or gradient is not finite.

        Raises:
            TrainingError: A number is not finite; with its name, and samples that are not finite.
            SamewiseError: The recipe can explain the loss.
        """
        if not (wrong := _nonfinite_number(run, numbers)):
            return ()
        where = f"step {run.step + 1}"
        if data := nonfinite_data(run):
            raise TrainingError(
                Problem(
                    where,
                    f"{wrong} not finite, nor is {data}",
                    expected="finite numbers",
                    hint="check these data: unless the recipe leaves out such numbers, no "
                    "setting helps",
                )
            )
        rates = ", ".join(f"{rate:g}" for rate in run.learning_rates())
        raise TrainingError(
            Problem(
                where,
                f"{wrong} not finite; the learning rate was {rates}, the gradient's norm "
                f"{numbers.norm:g}",
                expected="a finite number",
                hint=f"{_SMALLER_STEPS}; any checkpoint from before this step is kept",
            )
        )

    def before_checkpoint(self, run: Run) -> Iterable[Caution]:
        """Raise a TrainingError if weights or buffers are not finite that were so initially."""
        if wrong := [
            name
            for name in nonfinite_names(run.model.state_dict().items())
            if name not in self._infinite
        ]:
            count = f", nor are {len(wrong) - 1} others" if len(wrong) > 1 else ""
            raise TrainingError(
                Problem(
                    f"step {run.step}",
                    f"{wrong[0]} is not finite{count}: no checkpoint is written",
                    expected="finite weights and buffers",
                    hint=f"{_SMALLER_STEPS}; any earlier checkpoint is kept",
                )
            )
        return ()


def _nonfinite_number(run: Run, numbers: Numbers) -> str:
    """Name the first number of a phase that is not finite, with a verb; empty if all are."""
    for name, value in numbers.losses.items():
        if not math.isfinite(value):
            for raise_reason in numbers.explain:
                raise_reason()
            return f"the {name} is"
    if math.isfinite(numbers.norm) or run.precision.may_overflow():
        return ""
    gradients = (
        [parameter.grad for parameter in run.parameters]
        if numbers.gradients is None
        else numbers.gradients
    )
    if wrong := nonfinite_names(
        zip([name for name, _ in run.model.named_parameters()], gradients, strict=True)
    ):
        return f"the gradient of {wrong[0]} is"
    # The squares of finite gradients may add up to infinity, which matters to clipping only
    return (
        "the gradient is too large to be clipped: the square of its norm is"
        if any(x.clip_norm is not None for x in run.phases)
        else ""
    )


def _local_values(tensor: Tensor) -> Tensor:
    values: Tensor = tensor.detach()
    values = values.to_local() if hasattr(values, "to_local") else values  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]  (a DTensor)
    # Torch has no norm for float8
    return values if values.dtype.itemsize > 1 else values.to(torch.float32)
