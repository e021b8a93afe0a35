"""Copies of a batch, and the message for a batch that cannot be copied or sent by a worker."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor

from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.records.digest import entries, tensor_kind


def deep_copy(batch: Any) -> Any:
    """Copy a batch into objects of its own.

    Raises:
        ConfigError: An entry cannot be copied; the message names it.
    """
    try:
        return deepcopy(batch)
    except Exception as error:
        raise ConfigError(unfit_entry(batch, deepcopy, "copied", error)) from error


def unfit_entry(
    batch: Any, attempt: Callable[[Any], object], done: str, error: Exception
) -> Problem:
    """Describe the innermost entry of a batch with which `attempt` fails.

    Args:
        batch: The batch.
        attempt: Function that failed with the batch.
        done: What it does with a batch, as a participle ("copied").
        error: Its error.
    """
    name, value = "", batch
    while (failure := _failing_part(value, attempt)) is not None:
        key, value, error = failure
        name = key or name
    kind = isinstance(value, Tensor) and tensor_kind(value)
    description = f"a {kind} tensor" if kind else f"of type {type(value).__qualname__}"
    message = (
        f"{f'{name!r} in a batch' if name else 'an entry of a batch'} is {description}, "
        "which cannot "
        f"be {done}"
    )
    return Problem(
        "dataset, recipe",
        f"{message}: {type(error).__name__}: {first_line(error)}",
        expected="dense tensors, arrays, numbers and texts; mappings, "
        "lists, tuples and dataclasses "
        "of these",
    )


def _failing_part(
    value: Any, attempt: Callable[[Any], object]
) -> tuple[str, Any, Exception] | None:
    """Return name, part and error of the first part with which `attempt` fails, or None."""
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
