"""The output of `--json`, and the files of a run, are valid JSON for strict parsers."""

import json
import math
from pathlib import Path

from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.json_text import to_json


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_values_that_json_lacks_become_null() -> None:
    value = {"best": {"valid/loss": float("nan")}, "curve": [1.5, float("inf")], "pair": (-float("inf"), 0.1), "path": Path("a"), "text": "NaN"}
    expected = {"best": {"valid/loss": None}, "curve": [1.5, None], "pair": [None, 0.1], "path": "a", "text": "NaN"}
    assert json.loads(to_json(value), parse_constant=refuse) == expected
    assert json.loads(to_json(value, indent=2), parse_constant=refuse) == expected


def test_files_spell_what_json_lacks_and_only_numbers_are_read_so(tmp_path: Path) -> None:
    file, metrics = tmp_path / "file.json", {"loss": math.nan, "psnr": math.inf, "gap": -math.inf, "step": 3}
    write_json(file, {"metrics": metrics, "name": "NaN", "pair": (1.5, math.nan)})
    words = {"loss": "NaN", "psnr": "Infinity", "gap": "-Infinity", "step": 3}
    assert json.loads(file.read_text(), parse_constant=refuse) == {"metrics": words, "name": "NaN", "pair": [1.5, "NaN"]}
    read = read_json(file, {"metrics": shapes.NUMBERS, "name": str})
    assert {name: repr(value) for name, value in read["metrics"].items()} == {name: repr(value) for name, value in metrics.items()}
    assert read["name"] == "NaN"
