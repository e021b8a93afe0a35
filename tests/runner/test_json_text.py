"""The output of `--json` is valid JSON for strict parsers."""

from __future__ import annotations

import json
from pathlib import Path

from samewise.runner.records.json_text import to_json


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_values_that_json_lacks_become_null() -> None:
    value = {"best": {"valid/loss": float("nan")}, "curve": [1.5, float("inf")], "pair": (-float("inf"), 0.1), "path": Path("a"), "text": "NaN"}
    expected = {"best": {"valid/loss": None}, "curve": [1.5, None], "pair": [None, 0.1], "path": "a", "text": "NaN"}
    assert json.loads(to_json(value), parse_constant=refuse) == expected
    assert json.loads(to_json(value, indent=2), parse_constant=refuse) == expected
