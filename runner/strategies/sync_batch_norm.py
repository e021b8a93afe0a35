"""Batch norm over the samples of all replicas (torch.nn.SyncBatchNorm)."""

from __future__ import annotations

import torch
from torch import nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.frozen import is_kept_in_eval_mode, keep_in_eval_mode
from samewise.runner.torch_private import BatchNorm

HINT = (
    "strategy=ddp strategy.sync_batch_norm=true, with a CUDA device for each replica (level "
    "R0); or norms that do not use the batch, such as torch.nn.GroupNorm"
)


def require_batch_norm(model: nn.Module, device: torch.device) -> None:
    """Raise a ConfigError unless the device is CUDA and the model has batch norms to replace."""
    if device.type != "cuda":
        expected = "a CUDA device for each process"
        raise ConfigError(
            Problem(
                "strategy.sync_batch_norm",
                "torch's SyncBatchNorm computes on CUDA devices only",
                str(device),
                expected,
                "device=cuda",
            )
        )
    if not any(isinstance(module, BatchNorm) for module in model.modules()):
        raise ConfigError(
            Problem(
                "strategy.sync_batch_norm",
                "the model has no batch norm to synchronise",
                True,
                "false",
            )
        )


def synchronise(model: nn.Module) -> None:
    """Replace the batch norms in place; parameters, buffers and names stay, also frozen norms."""
    frozen = [name for name, module in model.named_modules() if is_kept_in_eval_mode(module)]
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # Converted norms are new modules, without the hooks of the old ones
    for name in frozen:
        keep_in_eval_mode(model.get_submodule(name))


def refuse(is_set: bool, strategy: str) -> None:
    """Raise a ConfigError if the setting is used with a strategy that does not support it."""
    if is_set:
        message = (
            f"{strategy} gives each replica batch statistics of its own, so that any number of "
            "processes computes the same bits"
        )
        raise ConfigError(Problem("sync_batch_norm", message, True, "false", HINT))


def require_none(model: nn.Module, strategy: str) -> None:
    """Raise a ConfigError that names the layers that exchange statistics between processes."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        message = (
            f"SyncBatchNorm exchanges statistics among processes, but {strategy} promises the "
            "same bits on any number of them"
        )
        raise ConfigError(
            *(
                Problem(
                    f"model.{name}".rstrip("."),
                    message,
                    "SyncBatchNorm",
                    "torch.nn.BatchNorm2d",
                    HINT,
                )
                for name in names
            )
        )
