"""Loads a checkpoint's state into an optimizer, if the state is of the same parameters and the
optimizer finds in it what its steps need.
"""

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
    """Load a state, except for options, which may differ here, as the choice of implementation does
    under another strategy; a schedule sets its own anyway.

    A class that is neither torch's nor samewise's may change options in its steps: they are part of
    the state, except for those that are `changed` since (None: it is not known which).

    ConfigError if it is of other parameters, of the same in other groups or another order, or if an
    option needs averages that it does not have.
    """
    if problem := _misplaced(optimizer, state):
        raise ConfigError(problem)
    made_by = type(getattr(optimizer, "optim", optimizer))  # ZeroRedundancyOptimizer holds another
    options = {*inspect.signature(made_by).parameters, "fused", "foreach"} - {"params", *SCHEDULED}
    decided = (
        options
        if is_known(optimizer) or changed is None
        else options & {*changed, "fused", "foreach"}
    )
    groups = list[dict[str, Any]](state["param_groups"])
    for place, (own, group) in enumerate(
        zip(optimizer.param_groups, groups, strict=False)
    ):  # torch refuses another number of groups
        for name in ("amsgrad", "centered"):
            if own.get(name) and not group.get(name):
                raise ConfigError(
                    Problem(
                        f"optimizer.{name}",
                        "needs averages that the checkpoint does not have",
                        True,
                        "as in that run",
                    )
                )
        groups[place] = {
            **group,
            **{
                key: value
                for key, value in own.items()
                if key in decided or (key in options and key not in group)
            },
        }
    optimizer.load_state_dict({**state, "param_groups": groups})


def is_known(optimizer: Optimizer) -> bool:
    """Whether a class is torch's or samewise's: another may keep gradients between its steps, and
    change options in them.
    """
    made_by = type(getattr(optimizer, "optim", optimizer))  # ZeroRedundancyOptimizer holds another
    return made_by.__module__.partition(".")[0] in ("torch", "samewise")


def needed(optimizer: Optimizer, state: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the next step would need for a parameter and not find in a checkpoint's state, as a
    name; with the option that alone asks for it, if there is one.

    It is found by steps of copies of the optimizer that have one small parameter each, and of the
    checkpoint's state only the names.
    """
    if _misplaced(optimizer, state):
        return None  # `load_state` tells
    saved, tried = state["state"], set[Any]()
    for number, (group, there) in enumerate(
        zip(optimizer.param_groups, state["param_groups"], strict=False)
    ):
        for parameter, index in zip(group["params"], there["params"], strict=False):
            kept: Mapping[str, Any] = saved.get(index) or {}
            kind = (number, parameter.ndim, frozenset(kept))
            if not kept or kind in tried:
                continue
            tried.add(kind)
            if name := _missing(optimizer, group, parameter, kept):
                differing = [
                    key
                    for key, value in group.items()
                    if key in there and key not in _NO_OPTIONS and there[key] != value
                ]
                option = next(
                    (
                        key
                        for key in differing
                        if not _missing(optimizer, {**group, key: there[key]}, parameter, kept)
                    ),
                    "",
                )
                return name, option
    return None


def _misplaced(optimizer: Optimizer, state: Mapping[str, Any]) -> Problem | None:
    """Why torch, which matches parameters by their places in the groups, would give the state of
    one to another; None if it would not.
    """
    groups, saved = optimizer.param_groups, state["param_groups"]
    here, there = (
        [list(map(str, group.get("param_names", ()))) for group in each] for each in (groups, saved)
    )
    if not any(here) or not any(there):
        return _misshapen(optimizer, state)
    if here == there:
        return None
    mine, theirs = (
        {name: number for number, names in enumerate(each) for name in names}
        for each in (here, there)
    )
    only = {
        "here": [name for name in mine if name not in theirs],
        "there": [name for name in theirs if name not in mine],
    }
    if any(only.values()):
        words = "; ".join(
            f"only {where}: {first_few(names, 3)}" for where, names in only.items() if names
        )
        hint = (
            "freeze the same parameters as that run; to train some later, use frozen_until in "
            "a single run"
        )
        return Problem(
            "param_groups",
            f"other parameters are trained than in the checkpoint: {words}",
            hint=hint,
        )
    if set(map(frozenset, here)) != set(map(frozenset, there)):
        places = [
            (name, groups[mine[name]].get("name"), saved[theirs[name]].get("name")) for name in mine
        ]
        name, now, then = next((one for one in places if one[1] != one[2]), places[0])
        words = (
            f"sorts the parameters into other groups than in the checkpoint: {name} is in "
            f"'{now}' here, and in '{then}' there"
        )
        return Problem("param_groups", words, hint="use the rules of that run")
    name = next((one for one, other in zip(mine, theirs, strict=True) if one != other), here[0][0])
    words = (
        f"has the checkpoint's parameters in another order, from {name} on: their state would "
        "be given to others"
    )
    return Problem(
        "optimizer", words, hint="create the model's layers in that order, and not from a set"
    )


def _misshapen(optimizer: Optimizer, state: Mapping[str, Any]) -> Problem | None:
    """The same without names: a state that has the shape of another parameter, and neither its
    own's nor that of an average over some of its dimensions.
    """
    shapes = {parameter.shape for group in optimizer.param_groups for parameter in group["params"]}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        for parameter, index in zip(group["params"], saved["params"], strict=False):
            for name, value in (state["state"].get(index) or {}).items():
                found = getattr(value, "shape", parameter.shape)
                fits = not found or (
                    len(found) == parameter.ndim
                    and all(
                        one in (1, size) for one, size in zip(found, parameter.shape, strict=True)
                    )
                )
                if not fits and found in shapes:
                    words = (
                        f"the checkpoint's state is of other parameters: {name} of a parameter "
                        f"of shape {list(parameter.shape)} has the shape {list(found)}"
                    )
                    return Problem(
                        "optimizer", words, hint="train the parameters that that run trained"
                    )
    return None


def _missing(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    parameter: nn.Parameter,
    kept: Mapping[str, Any],
) -> str:
    """The name that a step looks up and does not find if a parameter has what is called as in
    `kept`; empty if there is none.
    """
    first = _step_of_copy(optimizer, options, parameter, None)
    if first is None:
        return ""
    made, small = first

    def as_kept(name: str) -> Any:
        value = kept[name]
        return (
            made[name]
            if name in made
            else torch.zeros_like(small)
            if isinstance(value, Mapping) or getattr(value, "ndim", 0)
            else deepcopy(value)
        )

    try:
        _step_of_copy(optimizer, options, parameter, {name: as_kept(name) for name in kept})
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

    Return its state and the parameter, or None if it fails.

    With `state`, which the parameter has before the step, a KeyError is raised.
    """
    own = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer holds another
    small = nn.Parameter(
        torch.ones([2] * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
    )
    small.grad = torch.ones_like(small)
    try:
        copied = own.__class__.__new__(own.__class__)
        others = {
            key: value
            for key, value in vars(own).items()
            if key not in ("state", "param_groups", "step")
        }
        vars(copied).update(
            deepcopy(
                others,
                {id(one): small for group in optimizer.param_groups for one in group["params"]},
            )
        )
        group = {
            key: deepcopy(value)
            for key, value in options.items()
            if key not in ("params", "param_names")
        }
        copied.param_groups = [{**group, "params": [small], "param_names": ["small"]}]
        copied.state = defaultdict(dict, {small: state} if state else {})
        copied.step()
    except Exception as error:
        if state and isinstance(error, KeyError):
            raise
        # One that takes no such parameter, or cannot be copied: its own first step will tell
        return None
    return copied.state[small], small
