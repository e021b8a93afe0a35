"""Batch norm over the samples of all replicas."""

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.frozen import is_kept_in_eval_mode, keep_in_eval_mode
from samewise.runner.torch_private import BatchNorm

Meet = Callable[[Tensor], Tensor]
"""Takes float[values, channels] of a micro-batch; returns float64[micro-batches, values, channels].
"""
PATH = "strategy.sync_batch_norm"


CURRENT: ContextVar[Meet | None] = ContextVar("batch_norm", default=None)
"""Exchanges values with the other micro-batches, while `meet_in_batch_norms` is in effect."""


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the model's batch norms.

    Raises:
        ConfigError: It has none.
    """
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    ConfigError.raise_if(
        not norms, PATH, "the model has no batch norm to synchronise", True, "false"
    )
    return norms


def require_cuda(device: torch.device) -> None:
    """Raise a ConfigError unless torch's SyncBatchNorm can compute on the device."""
    ConfigError.raise_if(
        device.type != "cuda",
        PATH,
        "torch's SyncBatchNorm computes on CUDA devices only",
        str(device),
        "a CUDA device for each process",
        "device=cuda; or strategy=elastic, whose batch norms are synchronised on any",
    )


def require_samples(plan: Plan) -> None:
    """Raise a ConfigError if a micro-batch has no samples in some step."""
    ConfigError.raise_if(
        not plan.fills_all,
        "loader.drop_last",
        "batch norms cannot be synchronised if a replica has no samples, as in an epoch's "
        "last batch here",
        plan.drop_last,
        hint="loader.drop_last=true, or strategy.sync_batch_norm=false",
    )


def meet_in_batch_norms(model: nn.Module) -> None:
    """Make batch norms use the statistics of all micro-batches, where `CURRENT` is set."""
    for norm in batch_norms(model):
        norm.forward = partial(_forward, norm.forward)


def _forward(forward: Callable[..., Any], *inputs: Any) -> Any:
    meet = CURRENT.get()
    with WholeBatchNorm(meet) if meet else nullcontext():
        return forward(*inputs)


def synchronise(model: nn.Module) -> None:
    """Replace the batch norms in place; parameters, buffers and names stay, also frozen norms."""
    frozen = [name for name, module in model.named_modules() if is_kept_in_eval_mode(module)]
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # Converted norms are new modules, without the hooks of the old ones
    for name in frozen:
        keep_in_eval_mode(model.get_submodule(name))


def require_none(model: nn.Module, strategy: str) -> None:
    """Raise a ConfigError that names the layers that exchange statistics between processes."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    ConfigError.raise_all(
        Problem(
            f"model.{name}".rstrip("."),
            f"SyncBatchNorm exchanges statistics among processes, but {strategy} promises "
            "the same bits on any number of them",
            "SyncBatchNorm",
            "torch.nn.BatchNorm2d",
            "strategy.sync_batch_norm=true synchronises them with the same bits",
        )
        for name in names
    )


@final
class WholeBatchNorm(TorchFunctionMode):
    """Mode in which batch norms use the mean and variance of all micro-batches' samples.

    Args:
        meet: Exchanges values with the other micro-batches.
    """

    def __init__(self, meet: Meet) -> None:
        super().__init__()
        self._meet = meet

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.batch_norm and kwargs["training"]:
            return self._normalise(*args, **kwargs)
        return func(*args, **kwargs)

    def _normalise(
        self,
        inputs: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        *,
        weight: Tensor | None,
        bias: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        with torch.no_grad():
            values, axes = _wide(inputs), _axes(inputs)
            # Some ten times as fast as torch.var_mean on the CPU
            mean = values.mean(axes, keepdim=True)
            own = [mean.flatten(), (values - mean).square().mean(axes)]
            count = torch.full_like(own[0], inputs.numel() / inputs.shape[1])
            means, variances, counts = self._meet(torch.stack([*own, count])).unbind(1)
            total = counts.sum(0)
            mean = (means * counts).sum(0) / total
            squares = ((variances + (means - mean).square()) * counts).sum(0)
            for running, value in (
                (running_mean, mean),
                (running_var, squares / (total - 1).clamp(min=1)),
            ):
                if running is not None:
                    running.lerp_(value.to(running.dtype), momentum)
        mean, variance = (value.to(values.dtype) for value in (mean, squares / total))
        inputs = _Deviations.apply(inputs, mean, variance, total, eps, self._meet)  # pyright: ignore[reportAssignmentType]
        return functional.batch_norm(inputs, mean, variance, weight, bias, eps=eps)


@final
class _Deviations(Function):
    """Passes inputs on, and adds the gradients that pass through the mean and the variance."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        mean: Tensor,
        variance: Tensor,
        total: Tensor,
        eps: float,
        meet: Meet,
    ) -> Tensor:
        ctx.save_for_backward(inputs, mean, variance, total)
        ctx.eps, ctx.meet = eps, meet
        return inputs.view_as(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = grad_outputs
        inputs, mean, variance, total = ctx.saved_tensors
        axes, gradients = _axes(inputs), _wide(gradient)
        normalised = functional.batch_norm(_wide(inputs), mean, variance, eps=ctx.eps)
        own = torch.stack([gradients.sum(axes), (gradients * normalised).sum(axes)])
        shape = [-1 if axis == 1 else 1 for axis in range(inputs.dim())]
        through_mean, through_variance = (ctx.meet(own).sum(0) / total).to(own.dtype)
        result = gradients - through_mean.view(shape) - normalised * through_variance.view(shape)
        return result.to(gradient.dtype), *[None] * 5


def _axes(inputs: Tensor) -> list[int]:
    return [0, *range(2, inputs.dim())]


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
