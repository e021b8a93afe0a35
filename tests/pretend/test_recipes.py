"""Each recipe trains on a CUDA device, is stopped, resumes from its checkpoint, and ends with the bits of a run that was not stopped."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pretended_cuda import PretendedDevice, written
from pretended_cuda.steps import counted

from samewise.runner.training.recorder import Recorder

STEPS = (
    "debug=tiny",
    "device=cuda",
    "tracking=none",
    "loader.num_workers=0",
    "max_steps=4",
    "evaluate.every_steps=2",
    "evaluate.limit=1",
    "dataset.samples=16",
)
CLIPS = {"vocoder": ("dataset.samples=200", "dataset.clips=16", "dataset.valid_clips=4")}
"""The number of samples of a vocoder is that of one clip."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", written.RECIPES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    device: PretendedDevice, samewise: Callable[..., Any], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def train(root: Path) -> Any:
        return samewise("train", *written.RECIPES[recipe], *STEPS, *CLIPS.get(recipe, ()), f"run_root={root}", "--json")

    whole = train(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    with monkeypatch.context() as patch:
        record = Recorder.record

        def stopped(recorder: Recorder, outcome: Any) -> None:
            record(recorder, outcome)
            if outcome.step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

        patch.setattr(Recorder, "record", stopped)
        assert train(tmp_path / "stopped").returncode == 3
    resumed = train(tmp_path / "stopped")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 2" in resumed.stderr
    one, other = (Path(json.loads(done.stdout.splitlines()[-1])["folder"]) for done in (whole, resumed))
    assert (one / "trace.jsonl").read_bytes() == (other / "trace.jsonl").read_bytes()
    assert json.loads((one / "environment.json").read_text())["decides"]["device"]["kind"] == "cuda"


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
