"""`resume_from=` starts an experiment from a checkpoint of another one."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from samewise_runner_resuming import composed, trained
from samewise_runner_resuming_space import TINY as SMALL
from samewise_tiny import DIGITS

from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.records import checkpoint
from samewise.runner.records.digest import state_sha256
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.build import build
from samewise.runner.training.dry_run import dry_run

TINY = [*DIGITS, "model.width=8", "max_epochs=4", "checkpoint.every_steps=2"]


def train(samewise, run_root: Path, *overrides: str) -> Path:
    done = samewise("train", *TINY, f"run_root={run_root}", *overrides, "--json")
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["folder"])


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_run_resumes_with_step_optimizer_schedule_and_averages(samewise, tmp_path):
    whole = train(samewise, tmp_path / "whole", "max_steps=4", "callbacks=ema", "callbacks.ema.every_steps=1")
    checkpoint = shutil.move(whole / "checkpoints" / "step-00000002", tmp_path / "kept")
    overrides = ("max_steps=4", "callbacks=ema", "callbacks.ema.every_steps=1", f"resume_from={checkpoint}")
    rest = train(samewise, tmp_path / "rest", *overrides)
    assert summary(rest)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert summary(rest)["metrics"]["final"] == summary(whole)["metrics"]["final"]
    assert rest.name != whole.name, "it is another experiment"
    head, *lines = map(json.loads, (rest / "trace.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [3, 4]
    (kept,) = (line for line in map(json.loads, (whole / "trace.jsonl").read_text().splitlines()[1:]) if line["step"] == 2)
    assert head["initial"] == {"step": 2, "weights": kept["layers"]["weights"]}

    elsewhere = shutil.move(checkpoint, tmp_path / "elsewhere")
    again = train(samewise, tmp_path / "again", *overrides[:-1], f"resume_from={elsewhere}")
    assert again.name == rest.name, "what the checkpoint holds counts, not where it lies"


def test_what_continues_a_run_has_one_fingerprint_however_often_and_wherever_that_run_was_trained(tmp_path):
    """The checkpoint's file says how long training took, and its bytes depend on how it was written."""
    ways = [(), ("checkpoint.background=false",)]
    for number, way in enumerate(ways):
        trained(composed(*SMALL, "callbacks=ema", "max_steps=2", *way), tmp_path / str(number))
    starts = [tmp_path / str(number) / "checkpoints" / "latest" for number in range(len(ways))]
    assert len({json.loads((one / "manifest.json").read_text())["sha256"] for one in starts}) > 1
    assert len({composed(*SMALL, "callbacks=ema", f"resume_from={one}").fingerprint for one in starts}) == 1
    state = checkpoint.load(starts[0])
    state["schedule"] = {**state["schedule"], "other": 1}
    assert state_sha256(state) != state_sha256(checkpoint.load(starts[0]))


@pytest.mark.slow
def test_the_reported_best_is_one_of_its_own_checkpoints_for_each_monitor(tmp_path):
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


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """The folder of a run of two steps, with three per epoch; its best checkpoint is not its last."""
    folder = tmp_path_factory.mktemp("runs") / "first" / "0123456789ab"
    trained(composed(*SMALL, "max_steps=2", "scheduler=one_cycle", "callbacks=early_stopping", "checkpoint.keep_last=2"), folder)
    (folder / "checkpoints" / "best").unlink()
    (folder / "checkpoints" / "best").symlink_to("step-00000001")
    return folder


def cautions_of(tmp_path: Path, *overrides: str) -> list[str]:
    """The warnings of a continued run, in one line each; nothing is written."""
    folder = tmp_path / "run"
    run = build(composed(*SMALL, *overrides), Project(Path.cwd()), RunFolder(folder))
    assert not folder.exists()
    return [f"{one.path}: {one.message}" for one in run.recorder.cautions]


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["max_steps=2"], "raise max_steps, to 3 or more"),
        (["max_steps=1"], "raise max_steps, to 3 or more"),
        (["max_steps=null", "max_epochs=1", "batch_size=32"], "raise max_epochs, to 3 or more"),
        (["max_steps=2", "max_epochs=1", "batch_size=32"], "raise max_epochs, to 3 or more; raise max_steps, to 3 or more"),
    ],
)
def test_if_nothing_is_left_to_train_the_error_says_what_to_raise(first, tmp_path, overrides, hint):
    with pytest.raises(ConfigError, match="resume_from: nothing is left to train: the checkpoint was taken at step 2") as caught:
        cautions_of(tmp_path, *overrides, f"resume_from={first}/checkpoints/latest")
    assert caught.value.problems[0].hint == hint
    assert caught.value.exit_code == 2


def test_a_schedule_of_another_length_than_in_the_checkpoint_is_reported(first, tmp_path):
    given = ["callbacks=early_stopping", f"resume_from={first}/checkpoints/step-00000001"]
    assert cautions_of(tmp_path, *given, "scheduler=one_cycle", "max_steps=2") == [], "nothing has changed"
    last = ["callbacks=early_stopping", f"resume_from={first}/checkpoints/step-00000002", "optimizer.lr=0.1"]
    (longer,) = cautions_of(tmp_path, *last, "scheduler=cosine", "scheduler.unit=step", "max_steps=9", "max_epochs=5")
    was, now = (0.05 * (1 + math.cos(math.pi * share)) for share in (1 / 2, 2 / 9))
    assert longer.startswith(f"scheduler: over 2 steps (3 per epoch), as in that run, this schedule's rate in step 2 is {was:.3g}; ")
    assert longer.endswith(f"; over 9 steps (3 per epoch), training continues with {now:.3g}")
    same = cautions_of(tmp_path, *last, "scheduler=cosine", "scheduler.unit=step", "max_steps=4", "max_epochs=5")
    assert same == [], "half of the rate in step 2 of 2, and after 2 of 4 steps"
    assert cautions_of(tmp_path, *given, "scheduler=constant", "max_steps=9", "max_epochs=5") == []
    (other,) = cautions_of(tmp_path, *given, "scheduler=constant", "max_steps=9", "max_epochs=5", "batch_size=4")
    assert other.startswith(
        "resume_from: training continues at the checkpoint's step 1, which was after 0.33 epochs of 3 steps, and is after 0.12 epochs of 8 steps"
    )


def test_a_checkpoint_that_does_not_fit_is_refused_with_a_way_out(samewise, tmp_path):
    folder = train(samewise, tmp_path / "narrow", "max_steps=2")
    done = samewise("train", *TINY, f"run_root={tmp_path}/wide", "max_steps=3", "model.width=16", f"resume_from={folder}/checkpoints/latest")
    assert done.returncode == 2
    assert "resume_from: does not fit this experiment" in done.stderr
    way_out = f"initialise.weights={folder}/checkpoints/latest"
    assert f"{way_out} takes the weights alone, those of other shapes left out with initialise.exclude=[PATTERN]" in done.stderr
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    ("before", "overrides", "said"),
    [
        ("adamw", ["optimizer=adamax"], "optimizer: it is Adamax here, and AdamW in that run"),
        ("rmsprop", ["optimizer=rmsprop", "optimizer.momentum=0.5"], "optimizer.momentum: needs averages that the checkpoint does not have"),
    ],
)
def test_an_optimizer_that_needs_what_the_checkpoint_lacks_is_refused_by_check_and_before_the_first_step(tmp_path, before, overrides, said):
    trained(composed(*SMALL, f"optimizer={before}", "max_steps=1"), tmp_path / "one")
    other = composed(*SMALL, *overrides, "max_steps=2", f"resume_from={tmp_path}/one/checkpoints/latest")
    for attempt in (lambda: dry_run(other, other.project), lambda: trained(other, tmp_path / "two")):
        with pytest.raises(ConfigError, match=f"resume_from: does not fit this experiment: {said}"):
            attempt()
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("+param_groups.f={match: 0.*, frozen: true}", "+param_groups.g={match: 1.*, frozen: true}", "param_groups.g freezes some here; param_groups.f"),
        ("initialise.frozen=[0.*]", "param_groups=none", r"only here: 0\.weight, 0\.bias \(initialise.frozen freezes some there\)"),
        ("param_groups=none", "param_groups=head_only", r"param_groups: other .*only there: 0\.weight, .* \(param_groups.\w+ freezes some here\)"),
    ],
)
def test_other_frozen_parameters_than_in_the_checkpoint_are_refused_by_check_and_before_the_first_step(tmp_path, before, after, said):
    trained(composed(*SMALL, "optimizer=adamw", before, "max_steps=1"), tmp_path / "one")
    start = tmp_path / "one" / "checkpoints" / "latest"
    other = composed(*SMALL, "optimizer=adamw", after, "max_steps=2", f"resume_from={start}")
    for attempt in (lambda: dry_run(other, other.project), lambda: trained(other, tmp_path / "two")):
        with pytest.raises(ConfigError, match=said) as caught:
            attempt()
        assert caught.value.problems[0].hint.startswith("freeze the same parameters as that run; to train some later, use frozen_until in a single run; or ")
    assert not (tmp_path / "two").exists()
