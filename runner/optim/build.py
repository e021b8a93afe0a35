"""Builds optimizers from the config's optimizer and parameter groups, and records which implementation does the arithmetic."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer

from samewise.runner.config.tree import plain
from samewise.runner.errors import ConfigError, Problem, first_few, nearest
from samewise.runner.interfaces import Phase
from samewise.runner.optim.groups import parameter_groups
from samewise.runner.optim.schedules.base import SCHEDULED
from samewise.runner.optim.stepping import begin_late_momentum

FUSED_ON: Final = ("cpu", "cuda")
"""Devices whose fused kernels are used: on the CPU they round square roots correctly, where the others take them from a library that does
not on every processor."""

_NO_OPTIONS: Final = ("params", "param_names", "name", "fused", "foreach", *SCHEDULED[:1], *(f"initial_{name}" for name in SCHEDULED))
"""Entries of a parameter group on which the names of the state do not depend."""

Instantiate = Callable[[Any, str], Any]
"""What turns a config node into an object, given the node's place in the config, for messages."""


def build_optimizers(
    optimizer: Mapping[str, Any], rules: Mapping[str, Any] | None, model: nn.Module, phases: Sequence[Phase], *, instantiate: Instantiate
) -> dict[str, Optimizer]:
    """One optimizer per phase, in order, from the config's `optimizer` (one for all, or one per phase) and its `param_groups`.

    The model is on its device already, and what the rules freeze is frozen. `instantiate` makes a component, here always with `_partial_`. ConfigError if
    names, options or values are wrong, or the optimizer cannot train this model.
    """
    if sparse := next((name for name, module in model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse), None):
        raise ConfigError(Problem("model", f"its layer {sparse} has sparse gradients, which are not supported", hint="create it with sparse=False"))
    nodes = _nodes(plain(optimizer), phases)
    options: dict[str, Any] = plain(rules) or {}
    made: dict[str, Optimizer] = {}
    for phase in phases:
        node, path = nodes[phase.name]
        groups = parameter_groups(model, options, prefixes=phase.modules)
        made[phase.name] = _build(instantiate({**node, "_partial_": True}, path), groups, path)
    return made


def describe(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Describe the optimizers for the record: class, implementation (`fused`, `foreach` or `loop`), and each group's size and options."""
    return {
        name: {
            "class": type(optimizer).__qualname__,
            "implementation": implementation(optimizer),
            "groups": [_describe_group(group) for group in optimizer.param_groups],
        }
        for name, optimizer in optimizers.items()
    }


def implementation(optimizer: Optimizer) -> str:
    """`fused`, `foreach` or `loop`: the kernels that do the arithmetic. Fused kernels round differently from the other two."""
    if optimizer.defaults.get("fused"):
        return "fused"
    return "foreach" if optimizer.defaults.get("foreach") else "loop"


def load_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state, except for options, which may differ here, as the choice of implementation does under another strategy; a schedule sets its own anyway.

    ConfigError if its parameters are the same in another order, or if an option needs averages that it does not have.
    """
    here, there = ([name for group in groups for name in group.get("param_names", ())] for groups in (optimizer.param_groups, state["param_groups"]))
    if here != there and sorted(here) == sorted(there):  # torch matches them by their place
        name = next(one for one, other in zip(here, there, strict=True) if one != other)
        words = f"has the checkpoint's parameters in another order, from {name} on: their state would be given to others"
        hint = "if the model was changed, initialise.weights takes the checkpoint's weights alone; if not, create it in the same order, not from a set"
        raise ConfigError(Problem("optimizer", words, hint=hint))
    made_by = type(getattr(optimizer, "optim", optimizer))  # ZeroRedundancyOptimizer holds another
    options = {*inspect.signature(made_by).parameters, "fused", "foreach"} - {"params", *SCHEDULED}
    groups = list[dict[str, Any]](state["param_groups"])
    for place, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=False)):  # torch refuses another number of groups
        for name in ("amsgrad", "centered"):
            if own.get(name) and not group.get(name):
                raise ConfigError(Problem(f"optimizer.{name}", "needs averages that the checkpoint does not have", True, "as in that run"))
        groups[place] = {**group, **{key: value for key, value in own.items() if key in options}}
    optimizer.load_state_dict({**state, "param_groups": groups})


def needed(optimizer: Optimizer, state: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the next step would need for a parameter and not find in a checkpoint's state, as a name; with the option that alone asks for it, if there is one.

    It is found by steps of copies of the optimizer that have one small parameter each, and of the checkpoint's state only the names.
    """
    saved, tried = state["state"], set[Any]()
    for number, (group, there) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=False)):
        for parameter, index in zip(group["params"], there["params"], strict=False):
            kept: Mapping[str, Any] = saved.get(index) or {}
            kind = (number, parameter.ndim, frozenset(kept))
            if not kept or kind in tried:
                continue
            tried.add(kind)
            if name := _missing(optimizer, group, parameter, kept):
                differing = [key for key, value in group.items() if key in there and key not in _NO_OPTIONS and there[key] != value]
                option = next((key for key in differing if not _missing(optimizer, {**group, key: there[key]}, parameter, kept)), "")
                return name, option
    return None


def _missing(optimizer: Optimizer, options: Mapping[str, Any], parameter: nn.Parameter, kept: Mapping[str, Any]) -> str:
    """The name that a step looks up and does not find if a parameter has what is called as in `kept`; empty if there is none."""
    first = _step_of_copy(optimizer, options, parameter, None)
    if first is None:
        return ""
    made, small = first

    def as_kept(name: str) -> Any:
        value = kept[name]
        return made[name] if name in made else torch.zeros_like(small) if isinstance(value, Mapping) or getattr(value, "ndim", 0) else deepcopy(value)

    try:
        _step_of_copy(optimizer, options, parameter, {name: as_kept(name) for name in kept})
    except KeyError as error:
        return str(error.args[0]) if error.args else ""
    return ""


def _step_of_copy(optimizer: Optimizer, options: Mapping[str, Any], parameter: nn.Parameter, state: dict[str, Any] | None) -> Any:
    """Take a step with a copy of the optimizer that has one small parameter; return its state and the parameter, or None if it fails.

    With `state`, which the parameter has before the step, a KeyError is raised.
    """
    own = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer holds another
    small = nn.Parameter(torch.ones([2] * parameter.ndim, dtype=parameter.dtype, device=parameter.device))
    small.grad = torch.ones_like(small)
    try:
        copied = own.__class__.__new__(own.__class__)
        others = {key: value for key, value in vars(own).items() if key not in ("state", "param_groups")}
        vars(copied).update(deepcopy(others, {id(one): small for group in optimizer.param_groups for one in group["params"]}))
        group = {key: deepcopy(value) for key, value in options.items() if key not in ("params", "param_names")}
        copied.param_groups = [{**group, "params": [small], "param_names": ["small"]}]
        copied.state = defaultdict(dict, {small: state} if state else {})
        copied.step()
    except Exception as error:
        if state and isinstance(error, KeyError):
            raise
        return None  # one that takes no such parameter, or cannot be copied: its own first step will tell
    return copied.state[small], small


def _nodes(optimizer: Mapping[str, Any], phases: Sequence[Phase]) -> dict[str, tuple[Mapping[str, Any], str]]:
    """Each phase's config node and its path."""
    names = [phase.name for phase in phases]
    if "_target_" in optimizer:
        return dict.fromkeys(names, (optimizer, "optimizer"))
    given = [str(name) for name in optimizer]
    unknown = [Problem(f"optimizer.{name}", "is not a phase of the recipe", hint=nearest(name, names)) for name in given if name not in names]
    missing = [
        Problem("optimizer", f"has no optimizer for the recipe's phase '{name}'", given, f"one for each of: {', '.join(names)}")
        for name in names
        if name not in given
    ]
    if unknown or missing:
        raise ConfigError(*unknown, *missing)
    return {name: (optimizer[name], f"optimizer.{name}") for name in names}


def _build(partial: Any, groups: list[dict[str, Any]], path: str) -> Optimizer:
    if not isinstance(partial, functools.partial):
        raise ConfigError(Problem(path, "must be partial, because it gets its parameters later", partial, "a torch.optim.Optimizer with `_partial_: true`"))
    make = cast("Callable[..., Any]", partial.func)
    settings = {key: _plain(value) for key, value in partial.keywords.items()}
    _refuse_what_cannot_train(make, settings, groups, path)
    parameters = inspect.signature(make).parameters
    accepted = set(parameters) - {"params"}
    _resolve(groups, settings.get("lr", parameters["lr"].default if "lr" in accepted else None), accepted, path)
    _try_options(make, settings, groups)
    settings |= _choice(make, settings, groups, accepted)
    try:
        optimizer = make(groups, **settings)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(_explain(error, settings, path)) from None
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(Problem(path, "does not create an optimizer", type(optimizer).__name__, "a torch.optim.Optimizer"))
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults.get("fused"):
        optimizer.register_step_pre_hook(begin_late_momentum)
    return optimizer


def _resolve(groups: list[dict[str, Any]], lr: Any, accepted: set[str], path: str) -> None:
    """Convert factors to learning rates, and refuse options that the optimizer does not have."""
    problems: dict[str, Problem] = {}
    for group in groups:
        factor = group.pop("lr_factor", None)
        if factor is not None and not isinstance(lr, int | float):
            raise ConfigError(Problem(f"{path}.lr", "is needed by lr_factor or layer_decay of param_groups", lr, "a number"))
        if factor is not None:
            group["lr"] = factor * lr
        for key in group.keys() - {"name", "params"}:
            group[key] = _plain(group[key])
            if key not in accepted:
                where = f"{_where(group)}.{key}"
                problems[where] = Problem(where, f"is not an option of {path}", group[key], hint=nearest(key, {*accepted, "lr_factor", "frozen"}))
    if problems:
        raise ConfigError(*problems.values())


def _try_options(make: Callable[..., Any], settings: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Check each group's options with torch's constructors, which accept them unchecked in a group."""
    if not make.__module__.startswith("torch.optim"):
        return
    problems: dict[str, Problem] = {}
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("name", "params")}
        try:
            make([nn.Parameter(torch.eye(1))], **{**settings, **options}) if options else None
        except (ValueError, TypeError, RuntimeError) as error:
            problem = _explain(error, options, _where(group))
            problems[problem.path] = problem
    if problems:
        raise ConfigError(*problems.values())


def rule_of(group: Mapping[str, Any]) -> str:
    """The rule of `param_groups` that a group comes from."""
    return str(group["name"]).partition(" x ")[0]


def _where(group: Mapping[str, Any]) -> str:
    return f"param_groups.{rule_of(group)}"


def _choice(make: Callable[..., Any], settings: Mapping[str, Any], groups: list[dict[str, Any]], accepted: set[str]) -> dict[str, bool]:
    """Fused kernels if these parameters have some, otherwise foreach on CUDA, otherwise the loop; nothing if the config decides."""
    if settings.get("fused") is not None or settings.get("foreach") is not None:
        return {}
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    devices = {parameter.device.type for parameter in parameters}
    in_shards = any(hasattr(parameter, "device_mesh") for parameter in parameters)  # DTensors, whose module is slow to import
    if in_shards and not (isinstance(make, type) and issubclass(make, torch.optim.Adam)):  # torch's fused kernels for shards
        return {"foreach": devices == {"cuda"}} if "foreach" in accepted else {}
    only_cpu = isinstance(make, type) and issubclass(make, torch.optim.Adagrad)
    if "fused" in accepted and devices <= set(FUSED_ON[:1] if only_cpu else FUSED_ON) and all(parameter.is_floating_point() for parameter in parameters):
        return {"fused": True}
    return {"foreach": devices == {"cuda"}} if "foreach" in accepted else {}


def _refuse_what_cannot_train(make: Callable[..., Any], settings: Mapping[str, Any], groups: list[dict[str, Any]], path: str) -> None:
    for where, options in ((path, settings), *((_where(group), group) for group in groups)):
        if options.get("differentiable"):
            raise ConfigError(Problem(f"{where}.differentiable", "would let gradients flow through updates, which training does not", True, "false"))
    if not isinstance(make, type):
        return
    if issubclass(make, torch.optim.LBFGS):
        hint = "choose another optimizer; `samewise list optimizer` shows them"
        raise ConfigError(Problem(path, "LBFGS evaluates the loss several times per step, which samewise does not support", hint=hint))
    needed = [
        one.name
        for one in list(inspect.signature(make.step).parameters.values())[1:]
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        words = f"{make.__name__}.step needs {needed[0]}: samewise calls it with no argument, and supports no closure that evaluates the loss again"
        raise ConfigError(Problem(path, words, hint="choose another optimizer; `samewise list optimizer` shows them"))
    if issubclass(make, torch.optim.Muon):
        wrong = [f"{name} {list(parameter.shape)}" for group in groups for name, parameter in group["params"] if parameter.ndim != 2]
        if wrong:
            hint = "train those with another phase's optimizer, or freeze them with param_groups"
            raise ConfigError(Problem(path, f"Muon only trains matrices, not {first_few(wrong, 5)}", expected="parameters with two dimensions", hint=hint))


def _explain(error: Exception, settings: Mapping[str, Any], path: str) -> Problem:
    """A constructor's error, at the setting that it concerns if it names one."""
    text = str(error)
    about = text.replace("learning rate", "lr").replace("beta parameter", "betas").split(":")[0].split()
    key = next((key for key in settings if key in about), None)
    return Problem(f"{path}.{key}", text, settings[key]) if key else Problem(path, text, dict(settings))


def _describe_group(group: Mapping[str, Any]) -> dict[str, Any]:
    held: list[torch.Tensor] = group["params"]
    outside = ("params", "param_names", "name", "fused", "foreach")
    options = {key: value for key, value in group.items() if key not in outside and not key.startswith("initial_")}
    return {"name": group.get("name", ""), "tensors": len(held), "elements": sum(one.numel() for one in held), **options}


def _plain(value: Any) -> Any:
    return tuple(cast("Sequence[Any]", value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
