"""`samewise diff` names where two runs diverge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from samewise_runner_altered_runs import TINY, flip_a_bit_and_correct_the_hash, forge, log_loss, recorded_in, rewrite_head, thin


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return recorded_in(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / original.parent.name / original.name, symlinks=True))


def test_a_run_resumed_from_an_altered_checkpoint_diverges_at_the_next_step(samewise, run, original):
    folder = run / "checkpoints/step-00000004"
    flip_a_bit_and_correct_the_hash(folder)
    for later in ("step-00000008", "step-00000012"):
        shutil.rmtree(run / "checkpoints" / later)
    (run / "summary.json").unlink()
    assert folder.exists()
    assert samewise("train", *TINY, f"run_root={run.parents[1]}").returncode == 0
    done = samewise("diff", original, run)
    assert done.returncode == 1
    assert "diverges at step 5: " in done.stdout


def test_initial_weights_that_differ_are_named(samewise, original, tmp_path):
    assert samewise("train", *TINY, "initialise=xavier", "max_steps=1", f"run_root={tmp_path}").returncode == 0
    (other,) = tmp_path.glob("*/*/")
    done = samewise("diff", original, other)
    assert done.returncode == 1
    assert "diverges at step 0: the initial weights: training begins with different ones; first in conv1.weight\n" in done.stdout
    head = json.loads((other / "trace.jsonl").read_text().splitlines()[0])
    rewrite_head(other, initial=None)
    words = "diverges at step 1: the forward pass: the same input gave a different loss; or the weights before that step differ, which a trace does not record"
    assert words in samewise("diff", original, other).stdout, "as a run of an earlier version of samewise"
    rewrite_head(other, initial={**head["initial"], "step": 3})
    assert words in samewise("diff", original, other).stdout, "the trace begins at another step"


def test_digests_of_shards_are_not_compared_with_those_of_whole_parameters(samewise, run, original):
    forge(run, 1, gradients="0" * 16, weights="0" * 16)
    rewrite_head(run, shards=2)
    done = samewise("diff", original, run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "digests by xxh3 and by xxh3 of 2 shards cannot be compared, so nothing is known about gradients and weights" in done.stdout
    assert "the same batches, inputs and losses in all 12 common steps" in done.stdout
    assert "the weights after step 12, by weights_sha256: the same" in done.stdout
    forge(run, 7, loss="0x1.8p+0")
    rewrite_head(run)
    log_loss(run, 7, 1.5)
    assert "step 7: the forward pass: the same input gave a different loss; or the weights before that step differ\n" in samewise("diff", original, run).stdout


def test_the_steps_between_two_lines_of_a_sparse_trace_are_not_left_out(samewise, run, tmp_path):
    other = thin(Path(shutil.copytree(run, tmp_path / "other", symlinks=True)), 3)
    forge(thin(run, 3), 9, loss="0x1.8p+0")
    rewrite_head(run)
    log_loss(run, 9, 1.5)
    said = samewise("diff", other, run).stdout
    words = "the forward pass: the same input gave a different loss; or the weights before that step differ\n"
    assert f"diverges at step 9, or in steps 7 to 8, which the trace omits: {words}" in said
    with open(run / "metrics.jsonl", "a") as journal:
        journal.write(json.dumps({"time_ms": 1, "step": 8, "metrics": {"train/loss": 9.5}}) + "\n")
    assert "diverges at step 8, or in step 7, which the trace omits: train/loss was logged as " in samewise("diff", other, run).stdout
    said = samewise("verify", other, "accumulate=2", "--coarse", "--trust").stdout
    assert "diverges at step 3, or in steps 1 to 2, which the trace omits: the data" in said


def test_traces_without_common_steps_leave_the_weights_and_metrics_to_diff(samewise, run, tmp_path):
    other = thin(Path(shutil.copytree(run, tmp_path / "other", symlinks=True)), 5)
    weights = "the weights after step 12, by weights_sha256: "
    for every in (7, 100):
        done = samewise("diff", other, thin(run, every))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith(f"trace:       no steps in common\ntrace:       {weights}the same\n")
    assert samewise("diff", run, run).returncode == 0
    with open(run / "metrics.jsonl", "a") as journal:
        journal.write(json.dumps({"time_ms": 1, "step": 8, "metrics": {"train/loss": 9.5}}) + "\n")
    done = samewise("diff", other, run)
    assert done.returncode == 1
    assert "diverges at or before step 8: train/loss was logged as " in done.stdout
    shutil.copy(other / "metrics.jsonl", run)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "weights_sha256": "0" * 64}))
    done = samewise("diff", other, run)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, f"trace:       {weights}they differ")
    (run / "summary.json").unlink()
    done = samewise("diff", other, run)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "trace:       no steps in common")


def test_logged_metrics_and_a_changed_trace_are_told_by_diff(samewise, run, original):
    forge(run, 7, loss="0x1.8p+0")
    done = samewise("diff", original, run)
    assert f"{run}: trace.jsonl was altered after the run had ended: its SHA-256 is not the one in summary.json" in done.stdout
    assert "a trace was altered: at step 7 the losses in the traces are " in done.stdout
    assert " and 1.5, and both runs logged the same ones\n" in done.stdout
    assert "the same bits in all 12 common steps\n" in done.stdout
    (run / "trace.jsonl").write_bytes((original / "trace.jsonl").read_bytes().replace(b'"layers":{"gradients":"', b'"layers":{"gradients":"0'))
    done = samewise("diff", original, run)
    assert done.returncode == 1
    assert "trace.jsonl was altered" in done.stdout
    shutil.copy(original / "trace.jsonl", run)
    assert samewise("diff", original, run).returncode == 0
    with open(run / "metrics.jsonl", "a") as journal, open(original / "metrics.jsonl") as known:
        logged = [line for line in map(json.loads, known) if "metrics" in line]
        journal.write(json.dumps({"time_ms": 1, "step": 5, "metrics": {"valid/loss": 0.5, "speed/steps": 2.0}}) + "\n")
        journal.write(json.dumps({"time_ms": 1, "step": 2, "metrics": {"train/loss": 9.5}}) + "\n")
    assert any(line["step"] == 2 for line in logged)
    done = samewise("diff", original, run)
    assert done.returncode == 1
    assert "| 9.5   differs" in done.stdout
    assert "speed/steps" not in done.stdout
    assert "the same bits in all 12 common steps, but metrics differ" in done.stdout


def test_a_metric_that_cannot_be_compared_is_not_said_to_differ(samewise, run, original):
    summary = json.loads((run / "summary.json").read_text())
    summary["metrics"]["final"]["valid/loss"] = 12.5
    (run / "summary.json").write_text(json.dumps({**summary, "steps": 10}))
    done = samewise("diff", original, run)
    assert (done.returncode, "differs" in done.stdout, "| 12.5   after other steps\n" in done.stdout) == (0, False, True), done.stdout
    (run / "metrics.jsonl").unlink()
    (run / "summary.json").unlink()
    done = samewise("diff", original, run)
    assert (done.returncode, "differs" in done.stdout, "| -   in one run only\n" in done.stdout) == (0, False, True), done.stdout


def test_runs_that_failed_are_compared_by_their_last_evaluations(samewise, run, original, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other", symlinks=True))
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert samewise("diff", original, run).stdout.count("valid/") == samewise("diff", original, original).stdout.count("valid/") > 0
    assert "run only" not in samewise("diff", original, run).stdout

    def log(step: int, loss: float) -> None:
        more = json.dumps({"time_ms": 1, "step": step, "metrics": {"valid/loss": loss, "epoch": 1.0}})
        (run / "metrics.jsonl").write_text("".join([*(line for line in lines if "valid/" not in line), more, "\n"]))

    log(5, 7.5)
    done = samewise("diff", original, run)
    assert (done.returncode, "| 7.5   after other steps\n" in done.stdout) == (0, True), done.stdout
    (other / "summary.json").unlink()
    found = json.loads(samewise("diff", other, run, "--json").stdout)
    assert (found["metrics"]["valid/loss"][1], found["evaluated"]) == (7.5, [12, 5])
    log(12, 8.5)
    done = samewise("diff", other, run)
    assert (done.returncode, "| 8.5   differs\n" in done.stdout) == (1, True), done.stdout


def test_models_with_other_tensors_are_compared_by_name(samewise, run, original):
    names = json.loads((run / "trace.jsonl").read_text().partition("\n")[0])["weights"]
    rewrite_head(run, weights=["stem.weight", *names[1:]])
    done = samewise("diff", original, run)
    assert done.returncode == 1
    words = f"{names[0]} only in the first run; stem.weight only in the second run; those of the same name are compared"
    assert f"the models have other parameters or buffers: {words}" in done.stdout
    rewrite_head(run, weights=[f"{name}_" for name in names])
    done = samewise("diff", original, run)
    assert done.returncode == 1
    assert "so nothing is known about gradients and weights" in done.stdout


def test_a_batch_divided_otherwise_is_not_called_another_batch(samewise, original, tmp_path):
    assert samewise("train", *TINY, "replicas=2", "max_steps=1", f"run_root={tmp_path}").returncode == 0
    (other,) = tmp_path.glob("*/*/")
    said = samewise("diff", original, other).stdout.replace("\n", " ")
    assert "diverges at step 1: the data: the batch is divided into other micro-batches" in said
    assert "replicas: 1 | 2" in said
    said = samewise("verify", original, "accumulate=2", "--coarse").stdout.replace("\n", " ")
    assert "diverges at step 1: the data: the batch is divided into other micro-batches" in said
    said = samewise("verify", original, "clip_norm=0.001", "--coarse").stdout.replace("\n", " ")
    assert "or they were clipped otherwise" in said


@pytest.mark.slow
def test_another_learning_rate_of_a_gan_is_not_called_a_forward_pass(samewise, tmp_path):
    given = ["experiment=gan_digits", "debug=tiny", "tracking=none", "evaluate.pictures=false", "max_steps=5", "scheduler=multi_step", "scheduler.unit=step"]
    for milestone in (3, 4):
        assert samewise("train", *given, f"scheduler.milestones=[{milestone}]", f"run_root={tmp_path / str(milestone)}").returncode == 0
    one, two = (next(tmp_path.glob(f"{milestone}/*/*")) for milestone in (3, 4))
    words = "diverges at step 4: the optimizer: the same gradients gave different weights; first in discriminator.0.weight\n"
    assert words in samewise("diff", one, two).stdout
    for known in (one, two):
        (known / "metrics.jsonl").unlink()
    assert words in samewise("diff", one, two).stdout
    assert words in samewise("verify", one, "scheduler.milestones=[4]", "--coarse").stdout
