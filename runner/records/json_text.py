"""JSON as other programs read it, for what `--json` prints."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON. NaN and infinities, which JSON does not have (RFC 8259, section 6), become null; what is of no JSON type becomes a string."""
    return json.dumps(_finite(value), indent=indent, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
