"""`resume_from=` starts an experiment from a checkpoint of another one."""

import json
import shutil
from pathlib import Path

import pytest
from samewise_runner_resuming import composed, trained
from samewise_runner_resuming_space import TINY as SMALL
from samewise_tiny import DIGITS

from samewise.runner.errors import ConfigError
from samewise.runner.records import checkpoint
from samewise.runner.records.digest import state_sha256
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


@pytest.mark.parametrize(
    ("before", "overrides", "said"),
    [
        ("adamw", ["optimizer=adamax"], "optimizer: it is Adamax here, and AdamW in that run"),
        ("adam", ["optimizer=adam", "optimizer.amsgrad=true"], "optimizer.amsgrad: needs averages that the checkpoint does not have"),
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
        (
            "+param_groups.f={match: 0.*, frozen: true}",
            "+param_groups.g={match: 1.*, frozen: true}",
            "param_groups: other parameters are trained than in the checkpoint: only here: 0.weight",
        ),
        ("initialise.frozen=[0.*]", "param_groups=none", r"only here: 0\.weight, 0\.bias"),
        ("param_groups=none", "param_groups=head_only", r"param_groups: other .*only there: 0\.weight, "),
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
