"""Checks that a model of the user's holds all that is learned, and is made alike each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samewise.runner.config.fingerprint import targets
from samewise.runner.config.instantiate import instantiate
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError, Problem, first_few
from samewise.runner.interfaces import Recipe
from samewise.runner.training.guards.hidden_state import is_own
from samewise.runner.training.run import Run


def require_none_learned(run: Run) -> None:
    """Raise a ConfigError if the recipe or the model has tensors that require gradients and are not
    the model's parameters.

    No optimizer trains them, no checkpoint holds them.
    """
    trained, packages = (
        {id(one) for one in (*run.parameters, *run.model.parameters())},
        {name.partition(".")[0] for name in run.composed.project.packages},
    )
    problems = list[Problem]()
    hints = {
        "recipe": "move it into the model, whose forward then computes with it",
        "model": "make it an nn.Parameter, or keep modules in an nn.ModuleList or nn.ModuleDict",
    }
    # Not where layers hold pieces of their weights
    parts = {"recipe": run.recipe} | ({"model": run.model} if run.strategy.compiles else {})
    for path, part in parts.items():
        if found := [
            name for name, one in _learned(part, packages, set()) if id(one) not in trained
        ]:
            message = (
                f"{first_few([f'{type(part).__name__}{name}' for name in found], 3)}: requires "
                "a gradient, but is not part of the model"
            )
            hint = f"{hints[path]}; or freeze it, if it is constant: requires_grad_(False)"
            problems.append(
                Problem(
                    path,
                    f"{message}: no optimizer trains it, and no checkpoint holds it",
                    expected="what is learned in the model",
                    hint=hint,
                )
            )
    if problems:
        raise ConfigError(*problems)


def require_same_model(run: Run) -> None:
    """Raise a ConfigError if a model of the user's, before training, has other weights than when it
    is made again from the same seed.

    Not for a training itself: the user's code may hold on to the model that was made last.
    """
    cfg, limit = run.config, 50_000_000
    as_made = not any(
        (cfg.initialise or {}).get(key) for key in ("rules", "weights", "parametrisations")
    )
    if (
        not run.strategy.compiles
        or not as_made
        or cfg.reproducibility.level == "fast"
        or not is_own(run.model)
        or sum(one.numel() for one in run.parameters) > limit
    ):
        return
    allowed = [name.partition(".")[0] for name in targets(cfg.model)]  # it was made before
    with streams.scope(run.seed, "init"):
        again = instantiate(cfg.model, "model", allowed=allowed).state_dict()
    here = {name: one.cpu() for name, one in run.model.state_dict().items() if name in again}
    if different := [
        name
        for name, one in here.items()
        if not torch.equal(one.nan_to_num(), again[name].nan_to_num())
    ]:
        message = f"has other initial weights each time it is made ({first_few(different, 3)})"
        expected = (
            "random numbers of torch, NumPy or random, as samewise seeds them, not of a "
            "generator of its own without a seed"
        )
        raise ConfigError(Problem("model", message, type(run.model).__name__, expected))


def _learned(value: Any, packages: Collection[str], seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that require gradients in an object of the user's, in modules, and in what
    contains them, by name: `.loss.centres`.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield "", value
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple | set):
        inside = enumerate(value)
    elif isinstance(value, nn.Module):
        others = [(name, one) for name, one in vars(value).items() if name not in vars(nn.Module())]
        inside = [*value.named_parameters(recurse=False), *value.named_children(), *others]
    elif isinstance(value, Recipe) or (
        type(value).__module__.partition(".")[0] in packages and hasattr(value, "__dict__")
    ):
        inside = vars(value).items()
    for name, one in inside:
        yield from (
            (f".{name}{further}", found) for further, found in _learned(one, packages, seen)
        )
