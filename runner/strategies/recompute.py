"""Activation checkpointing: a module's activations are freed and computed again in the backward pass, with the same bits (arXiv 1604.06174)."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samewise.runner.data.streams import preserve_generators
from samewise.runner.strategies.modules import match_modules

Buffers = list[tuple[nn.Module, str, Tensor]]
"""Buffers, by the module and the name that they have there."""


def recompute(model: nn.Module, patterns: Sequence[str] | str, path: str) -> None:
    """Make the modules that match the patterns recompute their activations. Parameter names do not change. ConfigError if a pattern means no module.

    Random numbers are those of the first time, of torch's generators (`torch.utils.checkpoint` keeps their state), Python's and NumPy's. The second time begins
    with the buffers as they were before the first and leaves them alone: batch norm's statistics are updated once.
    """
    for _, module in match_modules(model, patterns, path):
        if not is_recomputed(module):
            module.forward = partial(_forward, module, module.forward)


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recompute` was applied to a module."""
    forward: Any = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **further: Any) -> Any:
    if not torch.is_grad_enabled() or any(isinstance(one, torch.fx.Proxy) for one in (*inputs, *further.values())):  # torch.fx traces into it
        return forward(*inputs, **further)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=partial(_recompute_contexts, module), **further)


def _recompute_contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first and of the second computation."""
    held = [(part, name, buffer) for part in module.modules() for name, buffer in part.named_buffers(recurse=False)]
    before: Buffers = [(part, name, buffer.clone()) for part, name, buffer in held]
    return nullcontext(), _restore_around(held, before, random.getstate(), np.random.get_state())


@contextmanager
def _restore_around(held: Buffers, before: Buffers, python: Any, numpy: Any) -> Generator[None]:
    """Within it, buffers are copies of their former values, and Python's and NumPy's generators have their former state; all changes are undone."""
    now = [(part, name, getattr(part, name)) for part, name, _ in held]
    with preserve_generators():
        random.setstate(python)
        np.random.set_state(numpy)
        try:
            _restore(before)
            yield
        finally:
            _restore(now)


def _restore(buffers: Buffers) -> None:
    for part, name, buffer in buffers:
        setattr(part, name, buffer)
