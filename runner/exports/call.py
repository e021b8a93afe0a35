"""A model as a function of tensors: how its recipe calls it in evaluation, with the tensors that went in and came out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.interfaces import Batch, Recipe


class _Enough(BaseException):
    """Ends what calls the model after its first call; no recipe catches it."""


class Function(nn.Module):
    """The model from tensors to tensors, whatever lists and dicts its own call takes and gives.

    Args:
        model: In eval mode.
        args: Of the call, tensors in lists and dicts.
        kwargs: Likewise, by name.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        leaves, self._form = pytree.tree_flatten((args, kwargs))
        self._plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._plain)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._form)
        return tuple(leaf for leaf in pytree.tree_leaves(self.model(*args, **kwargs)) if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class Call:
    """One call of a model.

    Args:
        part: Which of the model's modules is called: empty for the model itself; a GAN's recipe calls `generator`.
        function: It.
        inputs: By name, as `forward` names its arguments: `x`, `images.0`.
        outputs: By name: `output`, or by their place in what the model returns: `output.0.boxes`.
    """

    part: str
    function: Function
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def observe(recipe: Recipe, model: nn.Module, batch: Batch, module: str | None = None) -> Call:
    """How a recipe calls its model on a batch: to predict, or else to measure it, or else which part of it to measure it.

    The outputs are the model's own, without autocast.

    Args:
        recipe: Predicts from the batch, or measures the model on it, up to the first call.
        model: In eval mode.
        batch: As an evaluation has it.
        module: The name of a module within the model, to be taken instead of it.

    Raises:
        ConfigError: there is no such module; or it calls neither the model nor a part of it with a tensor.
    """
    parts = dict(model.named_modules())
    if module is not None and module not in parts:
        raise ConfigError(Problem("--module", "the model has no such module", module, ", ".join(dict(model.named_children())), nearest(module, list(parts))))
    wanted = {module: parts[module]} if module is not None else {"": model}
    ways: list[tuple[Callable[[nn.Module, Batch], object], dict[str, nn.Module]]] = [(recipe.predict, wanted), (recipe.measure, wanted)]
    if module is None:
        ways.append((recipe.measure, dict(model.named_children())))
    part, args, kwargs = next(filter(None, (_first_call(use, model, batch, parts) for use, parts in ways)), ("", (), {}))
    called = model.get_submodule(part)
    inputs = dict(zip(_names(called, args, kwargs), (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), strict=True))
    if not inputs:
        words = "is not called with a tensor where the recipe evaluates a batch, so there is nothing to export"
        raise ConfigError(Problem("--module" if module else "model", words, module or type(model).__name__))
    function = Function(called, args, kwargs).eval()
    with torch.no_grad():
        returned = called(*pytree.tree_map_only(Tensor, torch.clone, args), **pytree.tree_map_only(Tensor, torch.clone, kwargs))
    outputs = {_joined("output", path): leaf for path, leaf in pytree.tree_leaves_with_path(returned) if isinstance(leaf, Tensor)}
    return Call(part, function, inputs, outputs)


def _first_call(
    use: Callable[[nn.Module, Batch], object], model: nn.Module, batch: Batch, parts: dict[str, nn.Module]
) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """The name of the first of some modules that is called, with what it is called with."""
    seen = list[tuple[str, tuple[Any, ...], dict[str, Any]]]()

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((name, *pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))))
        raise _Enough

    hooks = [module.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, module in parts.items()]
    try:
        with torch.no_grad(), suppress(_Enough, Exception):  # a recipe may not predict, or not from a sample of a data set
            use(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0] if seen else None


def _names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    named = [one.name for one in inspect.signature(model.forward).parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    for place, value in enumerate(args):
        first = named[place] if place < len(named) else f"input{place}"
        yield from (_joined(first, path) for path, leaf in pytree.tree_leaves_with_path(value) if isinstance(leaf, Tensor))
    for name, value in kwargs.items():
        yield from (_joined(name, path) for path, leaf in pytree.tree_leaves_with_path(value) if isinstance(leaf, Tensor))


def _joined(first: str, path: tuple[Any, ...]) -> str:
    return ".".join([first, *(str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path)])
