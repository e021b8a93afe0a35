"""`samewise diff` names where two runs diverge."""

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
    assert "diverges at step 0: the initial weights differ; first in conv1.weight\n" in done.stdout
    head = json.loads((other / "trace.jsonl").read_text().splitlines()[0])
    rewrite_head(other, initial=None)
    words = "diverges at step 1: the forward pass: the same input gave a different loss; or the weights before that step differ, which a trace does not record"
    assert words in samewise("diff", original, other).stdout, "as a run of an earlier version of samewise"
    rewrite_head(other, initial={**head["initial"], "step": 3})
    assert words in samewise("diff", original, other).stdout, "the trace begins at another step"


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


def test_logged_metrics_and_a_changed_trace_are_told_by_diff(samewise, run, original):
    forge(run, 7, loss="0x1.8p+0")
    done = samewise("diff", original, run)
    assert done.returncode == 1
    assert "diverges at step 7: the forward pass" in done.stdout
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
