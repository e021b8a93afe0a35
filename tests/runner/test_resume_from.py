"""`resume_from=` begins an experiment where another one's checkpoint stands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from samewise_runner_resuming import composed, trained
from samewise_runner_resuming_space import TINY as SMALL
from samewise_tiny import DIGITS

TINY = [*DIGITS, "model.width=8", "max_epochs=4", "checkpoint.every_steps=2"]


def train(samewise, run_root: Path, *overrides: str) -> Path:
    done = samewise("train", *TINY, f"run_root={run_root}", *overrides, "--json")
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["folder"])


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_it_goes_on_with_step_optimizer_schedule_and_averages(samewise, tmp_path):
    whole = train(samewise, tmp_path / "whole", "max_steps=4", "callbacks=ema", "callbacks.ema.every_steps=1")
    checkpoint = shutil.move(whole / "checkpoints" / "step-00000002", tmp_path / "kept")
    overrides = ("max_steps=4", "callbacks=ema", "callbacks.ema.every_steps=1", f"resume_from={checkpoint}")
    rest = train(samewise, tmp_path / "rest", *overrides)
    assert summary(rest)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert summary(rest)["metrics"]["final"] == summary(whole)["metrics"]["final"]
    assert rest.name != whole.name, "it is another experiment"
    steps = [json.loads(line).get("step") for line in (rest / "trace.jsonl").read_text().splitlines()]
    assert steps == [None, 3, 4]

    elsewhere = shutil.move(checkpoint, tmp_path / "elsewhere")
    again = train(samewise, tmp_path / "again", *overrides[:-1], f"resume_from={elsewhere}")
    assert again.name == rest.name, "what the checkpoint holds counts, not where it lies"


def test_what_is_told_as_best_is_a_checkpoint_of_its_own_by_each_monitor(tmp_path):
    several = ["evaluate.every_steps=1", "evaluate.monitor=[valid/loss,valid/accuracy]", "checkpoint.keep_every_steps=1"]
    trained(composed(*SMALL, *several, "max_steps=2"), tmp_path / "first")
    start = tmp_path / "first" / "checkpoints" / "step-00000002"
    trained(composed(*SMALL, *several, "max_steps=5", "optimizer.lr=20.0", f"resume_from={start}"), tmp_path / "spoilt")

    checkpoints, told = tmp_path / "spoilt" / "checkpoints", summary(tmp_path / "spoilt")["metrics"]
    scores = {path: json.loads((path / "manifest.json").read_text())["metrics"] for path in checkpoints.glob("step-*")}
    assert sorted(path.name for path in scores) == [f"step-{step:08d}" for step in (3, 4, 5)]
    lowest = min(one["valid/loss"] for one in scores.values())
    assert lowest > summary(tmp_path / "first")["metrics"]["best"]["valid/loss"], "it is worse than the run that it continues"
    assert told["best"]["valid/loss"] == lowest
    assert told["also"]["valid/accuracy"]["valid/accuracy"] == max(one["valid/accuracy"] for one in scores.values())
    for link, best in (("best", told["best"]), ("best-valid-accuracy", told["also"]["valid/accuracy"])):
        assert (checkpoints / link).resolve().name == f"step-{best['step']:08d}"


def test_a_checkpoint_that_does_not_fit_is_refused_with_the_way_out(samewise, tmp_path):
    folder = train(samewise, tmp_path / "narrow", "max_steps=2")
    done = samewise("train", *TINY, f"run_root={tmp_path}/wide", "max_steps=3", "model.width=16", f"resume_from={folder}/checkpoints/latest")
    assert done.returncode == 2
    assert "resume_from: does not fit this experiment" in done.stderr
    assert "initialise.weights" in done.stderr


@pytest.mark.parametrize(("given", "hint"), [("nowhere", "RUN/checkpoints"), ("run", "step-00000004")])
def test_what_is_no_checkpoint_is_refused(samewise, tmp_path, given, hint):
    for step in (2, 4):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    done = samewise("check", *TINY, f"run_root={tmp_path}", f"resume_from={tmp_path / given}")
    assert done.returncode == 2
    assert "is not the folder of a checkpoint" in done.stderr
    assert hint in done.stderr
