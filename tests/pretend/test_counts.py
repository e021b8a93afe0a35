"""What each recipe makes a CUDA device do in a step and in an evaluation batch is recorded in counts.json, and differences are named."""

from pathlib import Path

import pytest
from pretended_cuda import written
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
    assert recipes - {"instance_segmentation"} == {*written.RECIPES} == {*written.read()["recipes"]}
