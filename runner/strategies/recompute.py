"""Activation checkpointing: activations are freed and recomputed in the backward pass.

The bits are the same (T. Chen et al., arXiv 1604.06174). `match_modules` finds the modules that
a setting names, by class (`BasicBlock`) or by name (`layer4.*`).
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samewise.runner.data.streams import preserve_generators
from samewise.runner.errors import ConfigError, Problem, nearest

Buffers = list[tuple[nn.Module, str, Tensor]]
"""Buffers with their module and their name in it."""


def recompute(model: nn.Module, patterns: Sequence[str] | str, path: str) -> None:
    """Make the modules that match the patterns recompute their activations.

    Parameter names do not change. Both passes draw the same random numbers from torch's, Python's
    and NumPy's generators. The second pass starts from the same buffers and does not change them,
    so batch norm's statistics are updated once.

    Args:
        model: The model; changed in place.
        patterns: Classes or names of modules.
        path: Path of the patterns in the config.

    Raises:
        ConfigError: A pattern matches no module.
    """
    for _, module in match_modules(model, patterns, path):
        if not is_recomputed(module):
            module.forward = partial(_forward, module, module.forward)


def is_recomputed(module: nn.Module) -> bool:
    """Return whether `recompute` was applied to a module."""
    forward: Any = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
    # torch.fx traces into the module.
    is_traced = any(isinstance(x, torch.fx.Proxy) for x in (*inputs, *keywords.values()))
    if not torch.is_grad_enabled() or is_traced:
        return forward(*inputs, **keywords)
    return checkpoint(
        forward,
        *inputs,
        # The reentrant kind supports neither keyword arguments nor torch.autograd.grad
        use_reentrant=False,
        context_fn=partial(_recompute_contexts, module),
        **keywords,
    )


def _recompute_contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first and of later computations; a second derivative has two."""
    return nullcontext(), _Recomputation(module)


class _Recomputation:
    """Restores buffers and generators to their state before the first pass, and undoes all changes.

    Torch restores its own generators.
    """

    def __init__(self, module: nn.Module) -> None:
        buffers = [
            (part, name, buffer)
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
        self._before: Buffers = [(part, name, buffer.clone()) for part, name, buffer in buffers]
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._undo = list[ExitStack]()

    def __enter__(self) -> None:
        with ExitStack() as undo:
            undo.enter_context(preserve_generators())
            undo.callback(
                _restore, [(part, name, getattr(part, name)) for part, name, _ in self._before]
            )
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            # Clones, since a second derivative begins with the same buffers again
            _restore([(part, name, buffer.clone()) for part, name, buffer in self._before])
            self._undo.append(undo.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._undo.pop().__exit__(*error)


def _restore(buffers: Buffers) -> None:
    for part, name, buffer in buffers:
        setattr(part, name, buffer)


LISTS = (nn.ModuleList, nn.ModuleDict)
"""Modules that hold others and are never called."""


def match_modules(
    model: nn.Module, patterns: Sequence[str] | str, path: str
) -> list[tuple[str, nn.Module]]:
    """Return the modules that match one of the patterns, in the model's order, except the model.

    Raises:
        ConfigError: A pattern matches no module, or one that is never called.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    modules = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        if not any(_matches(pattern, name, module) for name, module in modules):
            choices = sorted(
                {type(module).__name__ for _, module in modules} | {name for name, _ in modules}
            )
            raise ConfigError(
                Problem(
                    path,
                    "matches no module of the model",
                    pattern,
                    "a class, or a pattern of names, of the model's modules",
                    nearest(pattern, choices),
                )
            )
    matches = [
        (name, module)
        for name, module in modules
        if any(_matches(pattern, name, module) for pattern in patterns)
    ]
    for name, module in matches:
        ConfigError.raise_if(
            isinstance(module, LISTS),
            path,
            f"{name} is a {type(module).__name__}, a container that is never called itself",
            name,
            "modules that are called",
            f"{name}.*",
        )
    return matches


def large_children(model: nn.Module, least: int) -> list[tuple[str, nn.Module]]:
    """Return the model's children with at least `least` parameters, shared with no other part.

    Children of module lists count as the model's.
    """
    children = list[tuple[str, nn.Module]]()
    for name, child in model.named_children():
        if isinstance(child, LISTS):
            children += [
                (f"{name}.{inner_name}", module)
                for inner_name, module in large_children(child, least)
            ]
        elif sum(parameter.numel() for parameter in child.parameters()) >= least and not _shares(
            model, child
        ):
            children.append((name, child))
    return children


def _matches(pattern: str, name: str, module: nn.Module) -> bool:
    return type(module).__name__ == pattern or fnmatchcase(name, pattern)


def _shares(model: nn.Module, child: nn.Module) -> bool:
    """Return whether another part of the model shares a parameter with the child (tied weights)."""
    own_ids, inner_modules = (
        {id(parameter) for parameter in child.parameters()},
        {id(module) for module in child.modules()},
    )
    other_modules = [module for module in model.modules() if id(module) not in inner_modules]
    return any(
        id(parameter) in own_ids
        for module in other_modules
        for parameter in module.parameters(recurse=False)
    )
