"""Loads a checkpoint's state into an optimizer, if parameters and steps fit."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch.optim import Optimizer

from samewise.runner.errors import ConfigError, Problem, first_few
from samewise.runner.optim.schedules.base import SCHEDULED


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
    ConfigError.raise_all(filter(None, [_misplaced(optimizer, state)]))
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
            ConfigError.raise_if(
                own_group.get(name) and not group.get(name),
                f"optimizer.{name}",
                "needs averages that the checkpoint does not have",
                True,
                "as in that run",
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
    # Torch takes over what is on the host already, such as parts of a checkpoint's file, which would
    # stay open when the checkpoint is pruned. What another process holds is None
    for values in filter(None, optimizer.state.values()):
        values.update({x: y.clone() for x, y in values.items() if getattr(y, "is_cpu", False)})


def is_known(optimizer: Optimizer) -> bool:
    """Return whether the class is torch's or samewise's.

    Another may keep gradients between its steps, and change options in them.
    """
    # ZeroRedundancyOptimizer holds the optimizer in `optim`.
    kind = type(getattr(optimizer, "optim", optimizer))
    return kind.__module__.partition(".")[0] in ("torch", "samewise")


def _misplaced(optimizer: Optimizer, state: Mapping[str, Any]) -> Problem | None:
    """Explain why torch, which matches parameters by position, would mix up states; None if not."""
    groups, saved = optimizer.param_groups, state["param_groups"]
    own_names, saved_names = (
        [list(map(str, group.get("param_names", ()))) for group in x] for x in (groups, saved)
    )
    if not any(own_names) or not any(saved_names) or own_names == saved_names:
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
        return Problem(
            "param_groups",
            f"other parameters are trained than in the checkpoint: {message}",
            hint="freeze the same parameters as that run; to train some later, use frozen_until in "
            "a single run",
        )
    if set(map(frozenset, own_names)) != set(map(frozenset, saved_names)):
        places = [
            (name, groups[own_places[name]].get("name"), saved[saved_places[name]].get("name"))
            for name in own_places
        ]
        name, now, then = next((place for place in places if place[1] != place[2]), places[0])
        return Problem(
            "param_groups",
            f"sorts the parameters into other groups than in the checkpoint: {name} is in "
            f"'{now}' here, and in '{then}' there",
            hint="use the rules of that run",
        )
    name = next(
        (x for x, saved_name in zip(own_places, saved_places, strict=True) if x != saved_name),
        own_names[0][0],
    )
    return Problem(
        "optimizer",
        f"has the checkpoint's parameters in another order, from {name} on: their state would "
        "be given to others",
        hint="create the model's layers in that order, and not from a set",
    )
