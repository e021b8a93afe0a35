"""Activation checkpointing: a module's activations are freed and computed again in the backward
pass, with the same bits (arXiv 1604.06174). Finds the modules that such a setting names, by class
(`BasicBlock`) or by a pattern of names (`layer4.*`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samewise.runner.data.streams import preserve_generators
from samewise.runner.errors import ConfigError, Problem, first_few, nearest

Buffers = list[tuple[nn.Module, str, Tensor]]
"""Buffers, by the module and the name that they have there."""


def recompute(model: nn.Module, patterns: Sequence[str] | str, path: str) -> None:
    """Make the modules that match the patterns recompute their activations.

    Parameter names do not change. ConfigError if a pattern means no module.

    Random numbers are those of the first time, of torch's generators (`torch.utils.checkpoint`
    keeps their state), Python's and NumPy's. The second time begins with the buffers as they were
    before the first and leaves them alone: batch norm's statistics are updated once.
    """
    for _, module in match_modules(model, patterns, path):
        if not is_recomputed(module):
            module.forward = partial(_forward, module, module.forward)


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recompute` was applied to a module."""
    forward: Any = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **further: Any) -> Any:
    if not torch.is_grad_enabled() or any(
        isinstance(one, torch.fx.Proxy) for one in (*inputs, *further.values())
    ):  # torch.fx traces into it
        return forward(*inputs, **further)
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        context_fn=partial(_recompute_contexts, module),
        **further,
    )


def _recompute_contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first computation and of the others: a second derivative takes two."""
    return _First(module), _Again(module)


class _First:
    """Requires that a computation leaves the parameters as they are: they would be changed each
    time.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._before = [(name, one, mark(one)) for name, one in self._module.named_parameters()]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and (
            changed := [name for name, one, before in self._before if mark(one) != before]
        ):
            words = (
                f"recomputes a {type(self._module).__name__} that changes parameters in its "
                f"forward pass ({first_few(changed, 3)}), which would be done twice"
            )
            raise ConfigError(
                Problem(
                    "activation_checkpointing",
                    words,
                    hint="choose modules within it, or make this change outside of it",
                )
            )


def mark(parameter: Tensor) -> tuple[int, int]:
    """Another one after a change in place, which torch counts, or of where the values are."""
    return parameter._version, 0 if hasattr(
        parameter, "placements"
    ) else parameter.untyped_storage().data_ptr()  # a parameter of FSDP's has no address


class _Again:
    """Within it, buffers are copies of their former values, and Python's and NumPy's generators
    have their former state; all changes are undone.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [
            (part, name, buffer)
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]
        self._before: Buffers = [(part, name, buffer.clone()) for part, name, buffer in held]
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
            _restore([(part, name, buffer.clone()) for part, name, buffer in self._before])
            self._undo.append(undo.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._undo.pop().__exit__(*error)


def _restore(buffers: Buffers) -> None:
    for part, name, buffer in buffers:
        setattr(part, name, buffer)


LISTS = (nn.ModuleList, nn.ModuleDict)
"""They hold modules and are never called."""


def match_modules(
    model: nn.Module, patterns: Sequence[str] | str, path: str
) -> list[tuple[str, nn.Module]]:
    """The modules that match one of the patterns, in the model's order, never the model itself.

    ConfigError if a pattern means none, or one never called.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    every = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        if not any(_means(pattern, name, module) for name, module in every):
            known = sorted(
                {type(module).__name__ for _, module in every} | {name for name, _ in every}
            )
            expected = "a class, or a pattern of names, of the model's modules"
            raise ConfigError(
                Problem(
                    path,
                    "matches no module of the model",
                    pattern,
                    expected,
                    nearest(pattern, known),
                )
            )
    found = [
        (name, module)
        for name, module in every
        if any(_means(pattern, name, module) for pattern in patterns)
    ]
    for name, module in found:
        if isinstance(module, LISTS):
            message = (
                f"{name} is a {type(module).__name__}, a container that is never called itself"
            )
            raise ConfigError(Problem(path, message, name, "modules that are called", f"{name}.*"))
    return found


def large_children(model: nn.Module, least: int) -> list[tuple[str, nn.Module]]:
    """The model's children, and those of its module lists, with at least so many parameters that
    the rest does not share.
    """
    found = list[tuple[str, nn.Module]]()
    for name, child in model.named_children():
        if isinstance(child, LISTS):
            found += [(f"{name}.{inner}", module) for inner, module in large_children(child, least)]
        elif sum(parameter.numel() for parameter in child.parameters()) >= least and not _shares(
            model, child
        ):
            found.append((name, child))
    return found


def _means(pattern: str, name: str, module: nn.Module) -> bool:
    return type(module).__name__ == pattern or fnmatchcase(name, pattern)


def _shares(model: nn.Module, child: nn.Module) -> bool:
    """Whether another part of the model shares a parameter with the child (tied weights)."""
    mine, inside = (
        {id(parameter) for parameter in child.parameters()},
        {id(module) for module in child.modules()},
    )
    outside = [module for module in model.modules() if id(module) not in inside]
    return any(
        id(parameter) in mine
        for module in outside
        for parameter in module.parameters(recurse=False)
    )
