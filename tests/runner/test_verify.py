"""`samewise verify` reports whether a second training gives the same bits, and names where it diverges."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from samewise_runner_altered_runs import TINY, flip_a_bit_and_correct_the_hash, forge, recorded_in
from samewise_tiny import DIGITS

import samewise as sw
from samewise.runner.cli import main
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.verify.verdict import require_one_process


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return recorded_in(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / original.parent.name / original.name, symlinks=True))


def test_verify_reports_the_same_bits(samewise, run):
    done = samewise("verify", run, "loader.num_workers=1")
    assert done.returncode == 0, done.stderr
    assert "the same bits: 12 of 12 steps compared, weights" in done.stdout


def test_overrides_that_only_shorten_training_are_refused(samewise, run):
    done = samewise("verify", run, "max_steps=4")
    assert done.returncode == 2
    assert "max_steps: training would end after step 4, before step 12, the last to compare; hint: without max_steps, `--steps 4`" in done.stderr
    assert samewise("verify", run, "max_steps=4", "seed=1").returncode == 1, "what else differs may be found"


@pytest.mark.slow
def test_a_sparse_trace_is_compared_at_its_lines_and_weights_at_the_end(samewise, tmp_path):
    assert samewise("train", *TINY, "trace.every_steps=5", f"run_root={tmp_path}").returncode == 0
    (folder,) = tmp_path.glob("*/*/")
    assert "the same bits: 2 of 2 steps compared, weights" in samewise("verify", folder).stdout
    few = samewise("verify", folder, "--steps", "7").stdout
    assert "the same bits: 1 of 1 steps compared" in few
    assert "step 10" not in few


def test_another_seed_diverges_before_the_first_step(samewise, run):
    done = samewise("verify", run, "seed=1", "+param_groups.norms.dampening=0.0")
    assert done.returncode == 1
    assert "diverges at step 0: the initial weights differ; first in conv1.weight\n" in done.stdout
    assert "seed: 0 there, 1 here" in done.stdout
    assert "param_groups.norms.dampening: absent there, 0.0 here" in done.stdout


def test_a_flipped_bit_in_a_checkpoint_is_reported_with_its_step(samewise, run):
    state = run / "checkpoints/step-00000008/state.pt"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    done = samewise("verify", run)
    assert done.returncode == 1
    assert "step 8" in done.stdout
    assert "altered" in done.stdout


def test_a_trace_that_was_altered_differs_at_that_step(samewise, run):
    lines = forge(run, 6, weights="0" * 16)
    assert lines == 12
    assert samewise("verify", run, "--steps", "5").returncode == 0
    done = samewise("verify", run)
    assert done.returncode == 1
    assert "diverges at step 6: the optimizer: the same gradients gave different weights" in done.stdout


def test_an_audit_trains_the_same_drawn_parts_each_time(run, capsys):
    assert main(["verify", str(run), "--audit"]) == 0
    assert "the same bits: steps 0 to 4, 4 to 8, 8 to 12\n" in capsys.readouterr().out
    audited = sw.verify(run, audit=2, steps=3)
    assert audited.same
    assert audited.compared == 6
    assert set(audited.audit) < {(0, 3), (4, 7), (8, 11)}
    assert sw.verify(run, audit=2, steps=3).audit == audited.audit
    assert main(["verify", str(run), "--audit", "optimizer.lr=0.5"]) == 2, "a recorded state has the rate that was"


def test_an_audit_names_the_first_altered_step_and_tensor(run, capsys):
    (line,) = (line for line in (run / "trace.jsonl").read_text().splitlines() if '"step":6,' in line)
    layers = json.loads(line)["layers"]
    forge(run, 6, weights="0" * 16, layers={**layers, "weights": "0" * 8 + layers["weights"][8:]})
    assert main(["verify", str(run), "--audit"]) == 1
    printed = capsys.readouterr().out
    assert "the same bits: steps 0 to 4\ndiverges at step 6: the optimizer" in printed
    assert "first in conv1.weight\n" in printed


def test_an_audit_names_the_altered_tensor_of_a_checkpoint_and_refuses_a_damaged_one(run, capsys):
    flip_a_bit_and_correct_the_hash(run / "checkpoints/step-00000008")
    assert main(["verify", str(run), "--audit"]) == 1
    assert "diverges at step 8: step-00000008 has another state than training again: weights: fc.weight differs\n" in capsys.readouterr().out
    state = run / "checkpoints/step-00000012/state.pt"
    state.write_bytes(state.read_bytes()[:-10])
    assert main(["verify", str(run), "--audit"]) == 2
    assert "step-00000012: the checkpoint was cut short or altered" in capsys.readouterr().err


def test_a_digest_is_of_the_newest_checkpoint_or_it_says_so(run, capsys):
    newest = run / "checkpoints/step-00000012"
    (newest / "state.pt").write_bytes((newest / "state.pt").read_bytes()[:-10])
    assert main(["digest", str(run)]) == 2
    done = capsys.readouterr()
    assert not done.out
    assert "step-00000012: the checkpoint was cut short or altered" in done.err
    shutil.rmtree(newest)
    assert main(["digest", str(run)]) == 0
    assert "training went on to step 12, whose checkpoint is missing; this is step " in capsys.readouterr().err
    assert main(["eval", str(run), "--checkpoint=last", "--split=valid"]) == 0
    assert "training went on to step 12, whose checkpoint is missing; this is step " in capsys.readouterr().err


def test_eval_gives_the_metrics_of_training(samewise, run):
    final = json.loads((run / "summary.json").read_text())["metrics"]["final"]
    done = samewise("eval", run, "--checkpoint", "last", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["metrics"] == final
    assert found["step"] == 12
    assert (Path(found["pictures"]) / "confusion_matrix.png").stat().st_size > 1000


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "pipeline", "rpc", "elastic"])
def test_a_run_that_one_process_cannot_repeat_is_refused(strategy):
    project = Project(Path.cwd())
    composed = compose([*DIGITS, f"strategy={strategy}", "replicas=2" if strategy in ("fsdp", "ddp", "elastic") else "accumulate=2"], project=project)
    said = rf"strategy: `verify` trains again in one process, and strategy={strategy} needs several.*samewise train --fresh"
    with nullcontext() if strategy == "elastic" else pytest.raises(ConfigError, match=said):
        require_one_process(composed, project)
