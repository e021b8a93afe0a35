"""The differences between two training states, by tensor: a checkpoint's and one computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from samewise.runner.records.digest import value_digest

_HOW = ("fused", "foreach", "differentiable", "capturable")
"""Options of an optimizer for the implementation of its arithmetic, chosen on each machine (`optim.build.load_state`)."""


def state_differences(there: Mapping[str, Any], here: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """The differences between two states: (name, values in words, empty for a tensor), without times and the states of callbacks that only one side has.

    `names`: for each optimizer, the parameters that its state has numbers for.
    """
    found = list(_differing_tensors(there["model"], here["model"], "weights"))
    for name, one in there["optimizers"].items():
        found += _optimizer_differences(one, here["optimizers"].get(name, {}), names[name])
    for part in ("schedule", "precision", "metrics", "best", "also"):
        found += _differing_tensors(there.get(part, {}), here.get(part, {}), part)
    for name in there["callbacks"].keys() & here["callbacks"].keys():
        found += _differing_tensors(there["callbacks"][name], here["callbacks"][name], f"callbacks.{name}")
    return found


def _optimizer_differences(there: Mapping[str, Any], here: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, (one, two) in enumerate(zip(there["param_groups"], here.get("param_groups", ()), strict=False)):
        for option in sorted({*one, *two} - {*_HOW, "params"}):
            yield from _differing_tensors(one.get(option), two.get(option), f"the optimizer's {option}" + (f" of group {number}" if number else ""))
    for number, name in enumerate(names):
        one, two = there["state"].get(number, {}), here.get("state", {}).get(number, {})
        for part in [*one, *(part for part in two if part not in one)]:
            yield from _differing_tensors(one.get(part), two.get(part), f"the optimizer's {part} of {name}")


def _differing_tensors(there: Any, here: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in [*there, *(name for name in here if name not in there)]:
            yield from _differing_tensors(there.get(name), here.get(name), f"{path}: {name}")
    elif isinstance(there, list | tuple) and isinstance(here, list | tuple) and len(there) == len(here):
        for number, (one, two) in enumerate(zip(there, here, strict=True)):
            yield from _differing_tensors(one, two, f"{path}: {number}" if isinstance(one, Tensor | Mapping | list | tuple) else path)
    elif isinstance(there, Tensor) and isinstance(here, Tensor):
        if value_digest(there.contiguous()) != value_digest(here.contiguous()):
            yield path, ""
    elif isinstance(there, Tensor) or isinstance(here, Tensor):
        yield path, "a tensor there, none here" if isinstance(there, Tensor) else "a tensor here, none there"
    elif repr(there) != repr(here):
        yield path, f"{there!r} there, {here!r} here"
