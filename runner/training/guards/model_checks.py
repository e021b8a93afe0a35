"""Requires that the user's model holds everything learned, and is the same each time it is made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from samewise.runner.config.fingerprint import targets
from samewise.runner.config.instantiate import instantiate
from samewise.runner.data import streams
from samewise.runner.errors import ConfigError, Problem, first_few
from samewise.runner.interfaces import Recipe
from samewise.runner.training.guards.hidden_state import is_own
from samewise.runner.training.run import Caution, Guard, Run


@final
class LearnedElsewhere(Guard):
    """Refuses tensors that require gradients but are not the model's parameters.

    No optimizer trains such tensors, and no checkpoint holds them.
    """

    def at_start(self, run: Run) -> Iterable[Caution]:
        trained = {id(x) for x in (*run.parameters, *run.model.parameters())}
        packages = {name.partition(".")[0] for name in run.composed.project.packages}
        hints = {
            "recipe": "move it into the model, whose forward then computes with it",
            "model": "make it an nn.Parameter, or keep modules in an nn.ModuleList or "
            "nn.ModuleDict",
        }
        # Without the model where a strategy gives its layers pieces of their weights
        parts = {"recipe": run.recipe} | ({"model": run.model} if run.strategy.compiles else {})
        problems = list[Problem]()
        for path, part in parts.items():
            learned = [name for name, x in _learned(part, packages, set()) if id(x) not in trained]
            if not learned:
                continue
            names = first_few([f"{type(part).__name__}{name}" for name in learned], 3)
            message = (
                f"{names}: requires a gradient, but is not part of the model: no optimizer trains "
                "it, and no checkpoint holds it"
            )
            hint = f"{hints[path]}; or freeze it, if it is constant: requires_grad_(False)"
            problems.append(
                Problem(path, message, expected="everything learned in the model", hint=hint)
            )
        if problems:
            raise ConfigError(*problems)
        return ()


@final
class SameModel(Guard):
    """Refuses a model of the user's that has other weights when it is made again.

    Only `check` asks it: in a training, the user's code may keep the model that was made last.
    """

    def at_start(self, run: Run) -> Iterable[Caution]:
        cfg, limit = run.config, 50_000_000
        is_changed = any(
            (cfg.initialise or {}).get(key) for key in ("rules", "weights", "parametrisations")
        )
        if (
            not run.strategy.compiles
            or is_changed
            or cfg.reproducibility.level == "fast"
            or not is_own(run.model)
            or sum(tensor.numel() for tensor in run.parameters) > limit
        ):
            return ()
        # The config's own check has passed, since the model was made from it before
        allowed = [name.partition(".")[0] for name in targets(cfg.model)]
        with streams.scope(run.seed, "init"):
            again = instantiate(cfg.model, "model", allowed=allowed).state_dict()
        if different := [
            name
            for name, tensor in run.model.state_dict().items()
            # NaN is unlike itself
            if name in again
            and not torch.equal(tensor.cpu().nan_to_num(), again[name].nan_to_num())
        ]:
            message = f"has other initial weights each time it is made ({first_few(different, 3)})"
            expected = (
                "random numbers of torch, NumPy or random, as samewise seeds them, not of a "
                "generator of its own without a seed"
            )
            raise ConfigError(Problem("model", message, type(run.model).__name__, expected))
        return ()


def _learned(
    value: Any, packages: Collection[str], visited: set[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that require gradients in an object, with their path: `.loss.centres`.

    It enters containers, modules, recipes and objects of the user's classes.
    """
    if id(value) in visited:
        return
    # Objects may refer to each other in a circle
    visited.add(id(value))
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield "", value
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple | set):
        inside = enumerate(value)
    elif isinstance(value, nn.Module):
        attributes = [
            (name, item) for name, item in vars(value).items() if name not in vars(nn.Module())
        ]
        inside = [*value.named_parameters(recurse=False), *value.named_children(), *attributes]
    elif isinstance(value, Recipe) or (
        type(value).__module__.partition(".")[0] in packages and hasattr(value, "__dict__")
    ):
        inside = vars(value).items()
    for name, item in inside:
        yield from (
            (f".{name}{further}", tensor) for further, tensor in _learned(item, packages, visited)
        )
