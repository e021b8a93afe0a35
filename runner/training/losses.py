"""Computes the loss of a micro-batch, for steps, rehearsals and guards alike."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samewise.runner.data import streams
from samewise.runner.data.keyed import Key
from samewise.runner.data.loading import MicroBatch
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Batch, Loss, Recipe, is_loss
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.run import Run

_RESERVED = {"loss", "gradient_norm", "lr"}
"""Names that samewise logs as `train/NAME`, and no part of a loss may have."""


def loss_of(
    run: Run, phase: TrainingPhase, micro: MicroBatch, *, model: nn.Module | None = None
) -> tuple[Batch, Loss]:
    """Compute a phase's loss of a micro-batch in the model's current mode, within its stream.

    Args:
        run: The run; its step keys the random numbers.
        phase: The phase whose loss to compute; the caller enters `phase.training`.
        micro: The samples as they were loaded. A transform or a recipe may change them in place.
        model: The model to call; None: the model as the strategy wraps it.

    Returns:
        The batch on the device, transformed, and its loss.
    """
    streams.enter(
        run.seed, "step", run.step, micro.number, phase.number, *filter(None, [phase.spec.turn])
    )
    batch = run.transforms["train"](micro.sent() if micro.sent else run.to_device(micro.batch))
    with run.precision.autocast():
        loss = run.recipe.loss(run.network if model is None else model, batch, phase.spec)
    require_loss(run.recipe, loss)
    return batch, loss


def first_samples(run: Run, samples: int) -> Any:
    """Load the first samples of a training, of this process's part of the step."""
    epoch, start, _ = run.plan.bounds(0, run.strategy.micro_batches[0])
    positions = np.arange(start, min(start + samples, len(run.order)))
    return run.splits["train"].keyed[
        Key(epoch, start, tuple(run.order.at(epoch, positions).tolist()))
    ]


def losses_of(run: Run, micro: MicroBatch) -> Iterator[Tensor]:
    """Compute a micro-batch's loss in each phase, float[], without the strategy's wrapper.

    The micro-batch is copied, so it stays as it is.
    """
    for phase in run.phases:
        with phase.training(run.step):
            # Cloned, since a later forward pass may write into the same tensor
            yield loss_of(run, phase, micro.copied(), model=run.model)[1].total.detach().clone()


def require_loss(recipe: Recipe, result: object) -> None:
    """Raise a ConfigError unless a recipe's result is a `Loss` with sound parts."""
    loss = is_loss(recipe, result)
    # Annotated as Any, since user code may have put anything there
    values: dict[str, Any] = {"total": loss.total, **loss.parts}
    if taken := _RESERVED & loss.parts.keys():
        raise ConfigError(
            Problem(
                "recipe",
                f"{type(recipe).__name__}.loss returns a part called '{min(taken)}', which "
                "samewise logs itself",
                expected="parts with other names",
            )
        )
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise _wrong_part(
                recipe,
                name,
                type(value).__name__,
                "a tensor without dimensions",
                "torch.as_tensor(value)",
            )
        if value.dim():
            raise _wrong_part(
                recipe,
                name,
                f"a tensor of shape {list(value.shape)}",
                "a tensor without dimensions",
                "a sum: .sum()",
            )
    count: Any = loss.count
    if not isinstance(count, int | float):
        raise _wrong_part(
            recipe, "count", type(count).__name__, "a number", "count=mask.sum().item()"
        )
    if not 0 <= count < math.inf:
        raise _wrong_part(recipe, "count", count, "0 or more")
    # Evaluations compute losses without gradients
    if not loss.total.requires_grad and torch.is_grad_enabled():
        raise _wrong_part(
            recipe,
            "total",
            "a tensor without a gradient",
            "what the model's outputs give",
            "compute it without .detach() or .item()"
            if count
            else "0.0 * output.sum() where nothing is counted",
        )


def _wrong_part(
    recipe: Recipe, name: str, value: object, expected: str, hint: str = ""
) -> ConfigError:
    return ConfigError(
        Problem(
            "recipe",
            f"{type(recipe).__name__}.loss returns a Loss whose {name} is {value}",
            expected=expected,
            hint=hint,
        )
    )
