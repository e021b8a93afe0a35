"""Finds the modules that a setting names: by class (`BasicBlock`) or by a pattern of names
(`layer4.*`).
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from samewise.runner.errors import ConfigError, Problem, nearest

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
