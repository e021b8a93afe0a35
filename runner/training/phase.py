"""One optimizer's part of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Phase
from samewise.runner.optim.frozen import temporarily_frozen
from samewise.runner.optim.gradients import leave_buffers, total_norm
from samewise.runner.optim.states import is_known
from samewise.runner.optim.unfreezing import Waiting
from samewise.runner.precision import Precision
from samewise.runner.strategies.base import Tally
from samewise.runner.torch_private import foreach_mul_


@dataclass(frozen=True)
class TrainingPhase:
    """A recipe's phase with its optimizer."""

    number: int
    spec: Phase
    optimizer: Optimizer
    others: Sequence[nn.Parameter] = ()
    """The parameters that only other phases train."""
    total_norm: Callable[[Sequence[Tensor]], Tensor] = total_norm
    """The 2-norm of some gradients together."""
    waiting: Sequence[Waiting] = ()
    """What is trained later, by the step from which on it is, the next first."""

    def training(self, step: int) -> AbstractContextManager[None]:
        """Within it, only the phase's parameters that the step trains collect gradients.

        Others would be discarded.
        """
        now = (
            next((one for one in self.waiting if step < one.until), None) if self.waiting else None
        )
        if not now and not self.others:
            return nullcontext()
        return temporarily_frozen(
            [*self.others, *(now.parameters if now else ())], now.layers if now else ()
        )

    def learning_rates(self) -> list[float]:
        """The learning rates of its parameter groups, in order.

        Groups that began with the same rate and have the same now are one.
        """
        return [
            now
            for _, now in dict.fromkeys(
                (float(group.get("initial_lr", group["lr"])), float(group["lr"]))
                for group in self.optimizer.param_groups
            )
        ]

    def condition_gradients(
        self, tally: Tally, precision: Precision, clip_norm: float | None
    ) -> Tensor:
        """Turn sums into the mean loss's gradient, and clip it.

        Returns the norm before clipping, float[], without a wait for the device.
        """
        precision.unscale(self.optimizer)
        if not tally.count:
            which = (
                f" of phase '{self.spec.name}'"
                if self.number or self.spec.name != Phase().name
                else ""
            )
            raise ConfigError(
                Problem(
                    "recipe",
                    f"the loss{which} counts nothing in this step: its count is 0 in every "
                    "micro-batch",
                    expected="more than 0",
                )
            )
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not is_known(self.optimizer):
            # It may keep gradients until the next step, as some published ones do
            leave_buffers(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if tally.weight != 1.0 and gradients:
            foreach_mul_(gradients, 1.0 / tally.weight)
        norm = self.total_norm(gradients)
        if clip_norm is not None and gradients:
            # So that what is not finite stays where it is, to be named
            scale = torch.clamp(clip_norm / (norm + 1e-6), max=1.0).nan_to_num_(1.0)
            foreach_mul_(gradients, scale)
        return norm
