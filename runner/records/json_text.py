"""JSON that other programs can read: for `--json`, and for the files of runs."""

import json
import math
from collections.abc import Callable
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON.

    NaN and infinities, which JSON lacks (RFC 8259, section 6), become null; values of other types
    become strings.
    """
    return json.dumps(
        respelled(value, lambda number: None), indent=indent, default=str, allow_nan=False
    )


def respelled(value: Any, spell: Callable[[float], str | None]) -> Any:
    """Return the value with each NaN and infinity replaced by what `spell` returns for it."""
    if isinstance(value, float) and not math.isfinite(value):
        return spell(value)
    if isinstance(value, dict):
        return {name: respelled(inner, spell) for name, inner in value.items()}
    return (
        [respelled(inner, spell) for inner in value] if isinstance(value, list | tuple) else value
    )
