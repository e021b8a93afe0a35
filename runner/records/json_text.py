"""JSON that other programs can read, for `--json`."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON. NaN and infinities, which JSON lacks (RFC 8259, section 6), become null; values of other types become strings."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
