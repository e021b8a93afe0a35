"""Loads a checkpoint's state into an optimizer, if parameters and steps fit."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem, first_few
from samewise.runner.optim.schedules.base import SCHEDULED

_NO_OPTIONS: Final = (
    "params",
    "param_names",
    "name",
    "fused",
    "foreach",
    *SCHEDULED[:1],
    *(f"initial_{name}" for name in SCHEDULED),
)
"""Entries of a parameter group on which the names of the state do not depend."""


def load_state(
    optimizer: Optimizer, state: Mapping[str, Any], changed: Collection[str] | None = ()
) -> None:
    """Load a state, but keep the optimizer's own options, which may differ from the checkpoint's.

    The choice of implementation differs under another strategy, for example; a schedule sets its
    options anyway.

    Args:
        optimizer: The optimizer.
        state: The checkpoint's state.
        changed: Options that the config changed since; None if unknown. A class that is neither
            torch's nor samewise's may change options in its steps, so only these keep their own
            value.

    Raises:
        ConfigError: The state is of other parameters, or of the same in other groups or another
            order, or an option needs averages that the state does not have.
    """
    if problem := _misplaced(optimizer, state):
        raise ConfigError(problem)
    # ZeroRedundancyOptimizer holds the optimizer in `optim`.
    kind = type(getattr(optimizer, "optim", optimizer))
    options = {*inspect.signature(kind).parameters, "fused", "foreach"} - {"params", *SCHEDULED}
    own_options = (
        options
        if is_known(optimizer) or changed is None
        else options & {*changed, "fused", "foreach"}
    )
    groups = list[dict[str, Any]](state["param_groups"])
    # Torch refuses another number of groups below.
    for number, (own_group, group) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        # Torch makes these averages only in a parameter's first step
        for name in ("amsgrad", "centered"):
            if own_group.get(name) and not group.get(name):
                raise ConfigError(
                    Problem(
                        f"optimizer.{name}",
                        "needs averages that the checkpoint does not have",
                        True,
                        "as in that run",
                    )
                )
        groups[number] = {
            **group,
            **{
                key: value
                for key, value in own_group.items()
                if key in own_options or (key in options and key not in group)
            },
        }
    optimizer.load_state_dict({**state, "param_groups": groups})


def is_known(optimizer: Optimizer) -> bool:
    """Return whether the class is torch's or samewise's.

    Another may keep gradients between its steps, and change options in them.
    """
    # ZeroRedundancyOptimizer holds the optimizer in `optim`.
    kind = type(getattr(optimizer, "optim", optimizer))
    return kind.__module__.partition(".")[0] in ("torch", "samewise")


def needed(optimizer: Optimizer, state: Mapping[str, Any]) -> tuple[str, str] | None:
    """Find an entry that the next step needs and the checkpoint's state lacks.

    Returns:
        The entry's name, and the option that alone asks for it, or an empty string. None if nothing
        is missing.
    """
    if _misplaced(optimizer, state):
        # `load_state` explains it.
        return None
    # Copies of the optimizer, each with one small parameter, take steps; only the names of the
    # checkpoint's state matter.
    saved, kinds = state["state"], set[Any]()
    for number, (group, saved_group) in enumerate(
        zip(optimizer.param_groups, state["param_groups"], strict=False)
    ):
        for parameter, index in zip(group["params"], saved_group["params"], strict=False):
            saved_state: Mapping[str, Any] = saved.get(index) or {}
            kind = (number, parameter.ndim, frozenset(saved_state))
            if not saved_state or kind in kinds:
                continue
            kinds.add(kind)
            if name := _missing(optimizer, group, parameter, saved_state):
                differing = [
                    key
                    for key, value in group.items()
                    if key in saved_group and key not in _NO_OPTIONS and saved_group[key] != value
                ]
                option = next(
                    (
                        key
                        for key in differing
                        if not _missing(
                            optimizer, {**group, key: saved_group[key]}, parameter, saved_state
                        )
                    ),
                    "",
                )
                return name, option
    return None


def _misplaced(optimizer: Optimizer, state: Mapping[str, Any]) -> Problem | None:
    """Explain why torch, which matches parameters by position, would mix up states; None if not."""
    groups, saved = optimizer.param_groups, state["param_groups"]
    own_names, saved_names = (
        [list(map(str, group.get("param_names", ()))) for group in x] for x in (groups, saved)
    )
    if not any(own_names) or not any(saved_names):
        return _misshapen(optimizer, state)
    if own_names == saved_names:
        return None
    own_places, saved_places = (
        {name: number for number, names in enumerate(x) for name in names}
        for x in (own_names, saved_names)
    )
    only = {
        "here": [name for name in own_places if name not in saved_places],
        "there": [name for name in saved_places if name not in own_places],
    }
    if any(only.values()):
        message = "; ".join(
            f"only {where}: {first_few(names, 3)}" for where, names in only.items() if names
        )
        hint = (
            "freeze the same parameters as that run; to train some later, use frozen_until in "
            "a single run"
        )
        return Problem(
            "param_groups",
            f"other parameters are trained than in the checkpoint: {message}",
            hint=hint,
        )
    if set(map(frozenset, own_names)) != set(map(frozenset, saved_names)):
        places = [
            (name, groups[own_places[name]].get("name"), saved[saved_places[name]].get("name"))
            for name in own_places
        ]
        name, now, then = next((place for place in places if place[1] != place[2]), places[0])
        message = (
            f"sorts the parameters into other groups than in the checkpoint: {name} is in "
            f"'{now}' here, and in '{then}' there"
        )
        return Problem("param_groups", message, hint="use the rules of that run")
    name = next(
        (x for x, saved_name in zip(own_places, saved_places, strict=True) if x != saved_name),
        own_names[0][0],
    )
    message = (
        f"has the checkpoint's parameters in another order, from {name} on: their state would "
        "be given to others"
    )
    return Problem(
        "optimizer", message, hint="create the model's layers in that order, and not from a set"
    )


def _misshapen(optimizer: Optimizer, state: Mapping[str, Any]) -> Problem | None:
    """Explain that a state has another parameter's shape, where parameters have no names.

    A state may be an average over some of its parameter's dimensions.
    """
    shapes = {parameter.shape for group in optimizer.param_groups for parameter in group["params"]}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for parameter, index in zip(group["params"], saved["params"], strict=False):
            for name, value in (state["state"].get(index) or {}).items():
                shape = getattr(value, "shape", parameter.shape)
                fits = not shape or (
                    len(shape) == parameter.ndim
                    and all(x in (1, size) for x, size in zip(shape, parameter.shape, strict=True))
                )
                # Only the shape of another parameter shows that states were mixed up
                if not fits and shape in shapes:
                    message = (
                        f"the checkpoint's state is of other parameters: {name} of a parameter "
                        f"of shape {list(parameter.shape)} has the shape {list(shape)}"
                    )
                    return Problem(
                        "optimizer", message, hint="train the parameters that that run trained"
                    )
    return None


def _missing(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    parameter: nn.Parameter,
    saved_state: Mapping[str, Any],
) -> str:
    """Return the name that a step looks up in a parameter's saved state in vain, or ""."""
    step = _step_of_copy(optimizer, options, parameter, None)
    if step is None:
        return ""
    new_state, small = step

    def small_value(name: str) -> Any:
        value = saved_state[name]
        return (
            new_state[name]
            if name in new_state
            else torch.zeros_like(small)
            if isinstance(value, Mapping) or getattr(value, "ndim", 0)
            else deepcopy(value)
        )

    try:
        _step_of_copy(
            optimizer, options, parameter, {name: small_value(name) for name in saved_state}
        )
    except KeyError as error:
        return str(error.args[0]) if error.args else ""
    return ""


def _step_of_copy(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    parameter: nn.Parameter,
    state: dict[str, Any] | None,
) -> Any:
    """Take a step with a copy of the optimizer that has one small parameter.

    Return its state and the parameter, or None if it fails. With `state`, the parameter's before
    the step, a KeyError is raised.
    """
    # ZeroRedundancyOptimizer holds the optimizer in `optim`.
    original = getattr(optimizer, "optim", optimizer)
    small = nn.Parameter(
        torch.ones([2] * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
    )
    small.grad = torch.ones_like(small)
    try:
        # Without its constructor, which may need other arguments
        copied_optimizer = original.__class__.__new__(original.__class__)
        attributes = {
            key: value
            for key, value in vars(original).items()
            # A `step` among the attributes is bound to the original (`sharding.take_whole_states`)
            if key not in ("state", "param_groups", "step")
        }
        vars(copied_optimizer).update(
            deepcopy(
                attributes,
                {id(x): small for group in optimizer.param_groups for x in group["params"]},
            )
        )
        group = {
            key: deepcopy(value)
            for key, value in options.items()
            if key not in ("params", "param_names")
        }
        copied_optimizer.param_groups = [{**group, "params": [small], "param_names": ["small"]}]
        copied_optimizer.state = defaultdict(dict, {small: state} if state else {})
        copied_optimizer.step()
    except Exception as error:
        if state and isinstance(error, KeyError):
            raise
        # The optimizer takes no such parameter, or cannot be copied; its own first step shows that.
        return None
    return copied_optimizer.state[small], small
