"""A phase of a step: one optimizer, with the parameters that it trains."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

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
    untrained: Sequence[nn.Parameter] = ()
    """The parameters that only other phases train."""
    total_norm: Callable[[Sequence[Tensor]], Tensor] = total_norm
    """A function that returns the 2-norm of gradients together, float[]."""
    clip_norm: float | None = None
    """The largest 2-norm of its gradient; None: no limit."""
    clips: Sequence[Callable[[Sequence[nn.Parameter]], None]] = ()
    """Functions that clip the gradients of parameters further."""
    waiting: Sequence[Waiting] = ()
    """The parameters that are trained from a later step, in the order of these steps."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that its optimizer trains."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def training(self, step: int) -> AbstractContextManager[None]:
        """Freeze, for a block, all parameters but those that the phase trains at a step."""
        frozen = next((x for x in self.waiting if step < x.until), None) if self.waiting else None
        if not frozen and not self.untrained:
            return nullcontext()
        return temporarily_frozen(
            [*self.untrained, *(frozen.parameters if frozen else ())],
            frozen.layers if frozen else (),
        )

    def learning_rates(self) -> list[float]:
        """Return the learning rates of the parameter groups, in order.

        Groups with the same initial rate and the same rate at this step are listed once.
        """
        return [
            rate
            for _, rate in dict.fromkeys(
                (float(group.get("initial_lr", group["lr"])), float(group["lr"]))
                for group in self.optimizer.param_groups
            )
        ]

    def condition_gradients(self, tally: Tally, precision: Precision) -> Tensor:
        """Turn the gradient of summed losses into that of their mean, and clip it.

        Args:
            tally: The sums over all micro-batches of the step.
            precision: Undoes its loss scale.

        Returns:
            The norm before clipping, float[], without a wait for the device.
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
        parameters = self.parameters
        if not is_known(self.optimizer):
            # Some published optimizers keep a reference to gradients until the next step
            leave_buffers(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if tally.weight != 1.0 and gradients:
            # The backward pass began with 1 / `nominal`; this is the rest of the division
            foreach_mul_(gradients, 1.0 / tally.weight)
        norm = self.total_norm(gradients)
        if self.clip_norm is not None and gradients:
            # A norm of NaN scales nothing, so the error can name the gradient that has NaN
            scale = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0).nan_to_num_(1.0)
            foreach_mul_(gradients, scale)
        for clip in self.clips:
            clip([p for p in parameters if p.grad is not None])
        return norm


def turns_of(phases: Sequence[TrainingPhase], step: int) -> list[TrainingPhase]:
    """Return the phases in the order in which they train in a step, each as often as it does.

    Raises:
        ConfigError: None of them trains.
    """
    turns = [
        phase if spec is phase.spec else replace(phase, spec=spec)
        for phase in phases
        for spec in phase.spec.turns(step)
    ]
    if not turns:
        raise ConfigError(Problem("recipe", f"none of its phases trains in step {step + 1}"))
    return turns


@torch.no_grad()
def clip_adaptively(parameters: Sequence[nn.Parameter], share: float) -> None:
    """Scale down each row of a gradient whose norm exceeds this share of the weights' norm.

    As in Brock et al. 2021, arXiv 2102.06171.
    """
    for parameter in parameters:
        assert parameter.grad is not None
        dims = tuple(range(1, parameter.dim())) or None
        norm, of_gradient = (
            torch.linalg.vector_norm(x, dim=dims, keepdim=True) for x in (parameter, parameter.grad)
        )
        largest = norm.clamp(min=1e-3) * share
        parameter.grad.mul_((largest / of_gradient.clamp(min=1e-6)).clamp(max=1.0))
