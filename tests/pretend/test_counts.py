"""What each recipe makes a CUDA device do in a step and in an evaluation batch is recorded in counts.json, and differences are named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from pretended_cuda import Counts, written
from pretended_cuda.places import Place
from pretended_cuda.steps import counted


@pytest.mark.parametrize("recipe", written.RECIPES)
def test_launches_copies_and_waits_of_a_step_and_a_batch_are_as_recorded(recipe: str, tmp_path: Path):
    expected = written.read()
    if expected["versions"] != written.versions():
        pytest.skip(f"counts.json is of {expected['versions']}, here are {written.versions()}: other versions may make other operators of a function")
    told = written.differences(expected["recipes"][recipe], counted(written.RECIPES[recipe], tmp_path))
    assert not told, "\n".join(["", *told, f"If that is meant: {written.COMMAND} {recipe}"])


def test_every_recipe_has_recorded_counts(repository: Path):
    recipes = {file.stem for file in (repository / "configs" / "recipe").glob("*.yaml")}
    assert recipes == {*written.RECIPES} == {*written.read()["recipes"]}


def counts(**lines: int) -> Counts:
    """Counts of waits, by line of one function; those named `other` are of another function."""
    made = Counts()
    for name, amount in lines.items():
        made.add(Place("recipes/one.py", "One.other" if name == "other" else "One.loss", int(name.strip("line") or 0) if name != "other" else 9), waits=amount)
    return made


def test_a_difference_is_reported_with_numbers_function_and_lines():
    before = written.plain({"step": counts(line3=1, other=2)})
    told = written.differences(before, {"step": counts(line3=1, line5=1, other=2)})
    assert told == [
        "step: waits 3 -> 4   (times that the host waits for the device: a value is read, a shape depends on values, a copy blocks)",
        "    recipes/one.py One.loss: 1 -> 2: 1 at recipes/one.py:3 (One.loss), 1 at recipes/one.py:5 (One.loss)",
    ]


def test_removed_waits_are_reported_and_moved_ones_are_not():
    before = written.plain({"step": counts(line3=1, other=2)})
    assert written.differences(before, {"step": counts(line7=1, other=2)}) == []
    assert written.differences(before, {"step": counts(line3=1)})[1:] == ["    recipes/one.py One.other: 2 -> 0"]


def test_a_written_file_is_read_back_unchanged(tmp_path: Path):
    file = tmp_path / "counts.json"
    found: dict[str, Any] = {"step": counts(line3=1)}
    written.write({"classification": found}, file)
    kept = copy.deepcopy(written.read(file))
    written.write({"adversarial": found}, file)
    assert written.read(file)["recipes"]["classification"] == kept["recipes"]["classification"] == written.plain(found)
    assert written.differences(written.read(file)["recipes"]["adversarial"], found) == []
