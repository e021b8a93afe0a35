"""Activation checkpointing: a module's activations are thrown away and computed again in the backward pass, to the same bits (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from samewise.runner.strategies.modules import match_modules


def recompute(model: nn.Module, patterns: Sequence[str] | str, path: str) -> None:
    """Have the modules that the patterns mean compute their activations twice. Names of parameters stay as they are.

    Random numbers are those of the first time, since torch keeps the generators' state; buffers (batch norm's statistics) are not updated again.

    Raises:
        ConfigError: a pattern means no module.
    """
    for _, module in match_modules(model, patterns, path):
        module.forward = partial(_forward, module, module.forward)


def _forward(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **further: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **further)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=partial(_around, module), **further)


def _around(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first computation, and around the second."""
    return nullcontext(), _with_other_buffers(module)


@contextmanager
def _with_other_buffers(module: nn.Module) -> Generator[None]:
    """Within it the module's buffers are copies: what is done to them is forgotten."""
    held = [(part, name, buffer) for part in module.modules() for name, buffer in part.named_buffers(recurse=False)]
    for part, name, buffer in held:
        setattr(part, name, buffer.clone())
    try:
        yield
    finally:
        for part, name, buffer in held:
            setattr(part, name, buffer)
