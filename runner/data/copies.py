"""Copies of a batch that share nothing with it, and what to say of a batch that cannot be copied,
or sent by a loader's worker.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor

from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.records.digest import entries, tensor_kind


def deep_copy(batch: Any) -> Any:
    """The same values in objects of their own.

    ConfigError, with the entry, where one cannot be copied.
    """
    try:
        return deepcopy(batch)
    except Exception as error:
        raise ConfigError(unfit_entry(batch, deepcopy, "copied", error)) from error


def unfit_entry(
    batch: Any, attempt: Callable[[Any], object], done: str, error: Exception
) -> Problem:
    """The problem for an error of `attempt` with a batch, with the innermost entry of which it
    fails too: it cannot be `done`.
    """
    name, value = "", batch
    while (found := _failing_part(value, attempt)) is not None:
        key, value, error = found
        name = key or name
    kind = isinstance(value, Tensor) and tensor_kind(value)
    what = f"a {kind} tensor" if kind else f"of type {type(value).__qualname__}"
    words = (
        f"{f'{name!r} in a batch' if name else 'an entry of a batch'} is {what}, which cannot "
        f"be {done}"
    )
    known = (
        "dense tensors, arrays, numbers and texts; mappings, lists, tuples and dataclasses of these"
    )
    return Problem(
        "dataset, recipe", f"{words}: {type(error).__name__}: {first_line(error)}", expected=known
    )


def _failing_part(
    value: Any, attempt: Callable[[Any], object]
) -> tuple[str, Any, Exception] | None:
    """The first part of a value that `attempt` fails with: its name if it has one, the part, the
    error.
    """
    parts = (
        [("", part) for part in value]
        if isinstance(value, list | tuple)
        else [(str(key), part) for key, part in entries(value).items()]
    )
    for key, part in parts:
        try:
            attempt(part)
        except Exception as error:
            return key, part, error
    return None
