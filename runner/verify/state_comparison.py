"""Compares the states of two trainings, as checkpoints hold them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from samewise.runner.records.digest import value_digest
from samewise.runner.training.run import Run

_HOW = ("fused", "foreach", "differentiable", "capturable")
"""Options that choose an optimizer's implementation, by machine (`optim.states.load_state`)."""


def state_differences(
    there: Mapping[str, Any], here: Mapping[str, Any], names: Mapping[str, Sequence[str]]
) -> list[tuple[str, str]]:
    """Return the differences between two states, without times.

    Args:
        there: The recorded state.
        here: The state to compare.
        names: The names of each optimizer's parameters, in the order of the numbers in its state.

    Returns:
        Names of values that differ, each with a description; an empty one for a tensor.
    """
    differences = list(_differing_tensors(there["model"], here["model"], "weights"))
    for name, optimizer in there["optimizers"].items():
        differences += _optimizer_differences(
            optimizer, here["optimizers"].get(name, {}), names[name]
        )
    for part in ("schedule", "precision", "metrics", "best"):
        differences += _differing_tensors(there.get(part, {}), here.get(part, {}), part)
    for part in ("also", "callbacks"):
        entries, other_entries = there.get(part, {}), here.get(part, {})
        # Those of one side only may have been added or removed on resuming
        for name in entries.keys() & other_entries.keys():
            differences += _differing_tensors(entries[name], other_entries[name], f"{part}.{name}")
    return differences


def _optimizer_differences(
    there: Mapping[str, Any], here: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    for number, (group, other) in enumerate(
        zip(there["param_groups"], here.get("param_groups", ()), strict=False)
    ):
        for option in sorted({*group, *other} - {*_HOW, "params"}):
            yield from _differing_tensors(
                group.get(option),
                other.get(option),
                f"the optimizer's {option}" + (f" of group {number}" if number else ""),
            )
    for number, name in enumerate(names):
        state, other = there["state"].get(number, {}), here.get("state", {}).get(number, {})
        for part in [*state, *(part for part in other if part not in state)]:
            yield from _differing_tensors(
                state.get(part), other.get(part), f"the optimizer's {part} of {name}"
            )


def _differing_tensors(there: Any, here: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in [*there, *(name for name in here if name not in there)]:
            yield from _differing_tensors(there.get(name), here.get(name), f"{path}: {name}")
    elif (
        isinstance(there, list | tuple)
        and isinstance(here, list | tuple)
        and len(there) == len(here)
    ):
        for number, (tensor, other) in enumerate(zip(there, here, strict=True)):
            yield from _differing_tensors(
                tensor,
                other,
                f"{path}: {number}"
                if isinstance(tensor, Tensor | Mapping | list | tuple)
                else path,
            )
    elif isinstance(there, Tensor) and isinstance(here, Tensor):
        if value_digest(there.contiguous()) != value_digest(here.contiguous()):
            yield path, ""
    elif isinstance(there, Tensor) or isinstance(here, Tensor):
        yield (
            path,
            "a tensor there, none here"
            if isinstance(there, Tensor)
            else "a tensor here, none there",
        )
    # By `repr`, so that NaN equals NaN
    elif repr(there) != repr(here):
        yield path, f"{there!r} there, {here!r} here"


def parameter_names(run: Run) -> dict[str, Sequence[str]]:
    """Return the names of each phase's parameters, in the order of its optimizer's state."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    return {
        phase.spec.name: [
            names[id(x)] for group in phase.optimizer.param_groups for x in group["params"]
        ]
        for phase in run.phases
    }
