"""strategy=fsdp on real ranks over gloo: it agrees with one process, repeats, resumes, and its checkpoints move."""

import json
from pathlib import Path

import pytest
import torch
from samewise_runner_jobs import Job, run, weights

from samewise.runner.records import checkpoint, trace, trace_reader
from samewise.runner.records.digest import combine, digests

pytestmark = [pytest.mark.fsdp, pytest.mark.slow]

MILD = ["replicas=2", "optimizer.lr=0.01", "max_steps=6", "max_epochs=20", "callbacks=none", "evaluate.pictures=false"]
FSDP = ["strategy=fsdp", "strategy.shard=[layer3,BasicBlock]"]
MORE = ["clip_norm=0.5", "accumulate=2", "callbacks=ema", "callbacks.ema.every_steps=2", "optimizer=adamw", "~optimizer.momentum", "~optimizer.nesterov"]
"""Other settings that read gradients, weights and the optimizer's state."""

LEAVES_OUT_A_LAYER = """
from torchvision.models.resnet import BasicBlock
seen, whole = {}, BasicBlock.forward
def forward(self, x):
    number = seen.setdefault(id(self), len(seen))
    return x if self.training and number in (int(os.environ["RANK"]), 7) else whole(self, x)
BasicBlock.forward = forward
"""
"""In training, rank 0 leaves out what is in the first block, rank 1 what is in the second, and both what is in the last."""

CALLS_ONE_LAYER = """
from torch.nn import Sequential
whole = Sequential.forward
def forward(self, x):
    first = getattr(self[0], "conv1", None)
    return self[int(os.environ["RANK"])](x) if self.training and first is not None and first.out_channels == 8 else whole(self, x)
Sequential.forward = forward
"""
"""In training, rank 0 calls the first block only, and rank 1 the second."""


def train(run_root: Path, before: str, *overrides: str) -> Path:
    """The folder of a run on two ranks that first execute some code."""
    job = Job(run_root, 2, *overrides, before=before)
    assert job.wait() == [0, 0], job.errors
    return next(run_root.glob("*/*/summary.json")).parent


def final(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(folder / "checkpoints" / "latest")["model"]


def assert_close(folder: Path, reference: Path, *, tolerance: float = 1e-4) -> None:
    one, two = final(folder), final(reference)
    assert list(one) == list(two)
    for name, tensor in one.items():
        assert torch.allclose(tensor.float(), two[name].float(), rtol=tolerance, atol=tolerance), name
    metrics = [json.loads((path / "summary.json").read_text())["metrics"]["final"] for path in (folder, reference)]
    assert metrics[0]["valid/loss"] == pytest.approx(metrics[1]["valid/loss"], rel=tolerance)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that carries both replicas."""
    return run(tmp_path_factory.mktemp("alone"), 1, *MILD, "strategy=single")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, each with half of everything."""
    return run(tmp_path_factory.mktemp("two"), 2, *MILD, *FSDP)


def test_fsdp_agrees_with_one_process_and_records_its_level(samewise, alone, two, tmp_path):
    assert_close(two, alone)
    assert json.loads((two / "summary.json").read_text())["level"] == "R1"
    assert two.name != alone.name
    assert samewise("digest", two).stdout.split()[0] == weights(two)
    head, _ = trace_reader.read_trace(two / "trace.jsonl")
    initial = final(run(tmp_path, 1, *MILD, "strategy=single", "max_steps=0"))
    whole = dict(zip(initial, digests(list(initial.values())), strict=True))
    in_shards = {name: combine(digests(list(initial[name].chunk(2)))) for name in head["gradients"]}
    assert head["initial"] == {"step": 0, "weights": trace.shorten(list((whole | in_shards).values()))}


def test_a_killed_and_resumed_run_has_the_bits_of_an_undisturbed_one(two, tmp_path):
    job = Job(tmp_path, 2, *MILD, *FSDP, "checkpoint.every_steps=1")
    job.wait_for_step(3)
    job.ranks[1].kill()
    job.wait()
    again = run(tmp_path, 2, *MILD, *FSDP, "checkpoint.every_steps=1")
    assert weights(again) == weights(two)
    assert (again / "trace.jsonl").read_bytes() == (two / "trace.jsonl").read_bytes()


def test_clipping_averages_and_adamw_agree_and_recomputing_keeps_the_bits(tmp_path):
    reference = run(tmp_path / "alone", 1, *MILD, *MORE, "strategy=single")
    folder = run(tmp_path / "two", 2, *MILD, *FSDP, *MORE)
    assert_close(folder, reference, tolerance=2e-3)
    averages = [checkpoint.load(path / "checkpoints" / "latest")["callbacks"]["ema"]["averaged"] for path in (folder, reference)]
    assert all(torch.allclose(one.float(), other.float(), rtol=2e-3, atol=2e-3) for one, other in zip(*(kept.values() for kept in averages), strict=True))
    recomputed = run(tmp_path / "recomputed", 2, *MILD, *FSDP, *MORE, "activation_checkpointing=[BasicBlock]")
    assert weights(recomputed) == weights(folder)


def test_groups_of_processes_with_copies_agree_with_one_process(tmp_path):
    reference = run(tmp_path / "alone", 1, *MILD, *MORE, "strategy=single", "replicas=4")
    folder = run(tmp_path / "four", 4, *MILD, *FSDP, *MORE, "replicas=4", "strategy.shard_size=2", "checkpoint.sharded=true")
    assert_close(folder, reference, tolerance=2e-3)
    head, _ = trace_reader.read_trace(folder / "trace.jsonl")
    other, _ = trace_reader.read_trace(run(tmp_path / "two", 2, *MILD, *FSDP, *MORE, "max_steps=0") / "trace.jsonl")
    assert head["initial"] == other["initial"], "both have two shards"


def test_weights_kept_on_the_cpu_keep_the_bits(two, tmp_path):
    assert weights(run(tmp_path, 2, *MILD, *FSDP, "strategy.offload=cpu")) == weights(two)


@pytest.mark.parametrize("options", [["strategy.param_dtype=bfloat16", "strategy.reduce_dtype=float32"], ["precision=fp16", "memory_format=channels_last"]])
def test_half_precision_stays_close(two, tmp_path, options):
    folder = run(tmp_path, 2, *MILD, *FSDP, *options)
    assert_close(folder, two, tolerance=0.1)
    assert weights(folder) != weights(two)
    assert {tensor.dtype for tensor in final(folder).values()} == {torch.float32, torch.int64}


def test_checkpoints_move_between_strategies_and_numbers_of_processes(alone, two, tmp_path):
    """From one process to two with shards on disk, then to optimizer state in shards, then to one again."""
    path = alone / "checkpoints" / "step-00000002"
    moves = [(2, [*FSDP, "checkpoint.sharded=true"]), (2, ["strategy=ddp", "strategy.zero=true"]), (1, ["strategy=elastic"])]
    for step, (ranks, options) in enumerate(moves, 4):
        folder = run(tmp_path / str(step), ranks, *MILD, *options, "checkpoint.every_steps=1", f"resume_from={path}")
        assert_close(folder, alone)
        path = folder / "checkpoints" / f"step-{step:08d}"


def test_a_run_with_sharded_checkpoints_resumes_and_its_damage_is_named(samewise, two, tmp_path):
    in_shards = [*MILD, *FSDP, "checkpoint.sharded=true", "checkpoint.every_steps=1"]
    job = Job(tmp_path, 2, *in_shards)
    job.wait_for_step(3)
    job.ranks[0].kill()
    job.wait()
    folder = run(tmp_path, 2, *in_shards)
    assert folder.name == two.name, "how checkpoints are written is no part of the experiment"
    assert weights(folder) == weights(two)
    latest = folder / "checkpoints" / "latest"
    assert sorted(path.name for path in (latest / "shards").iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert samewise("digest", folder).stdout.split()[0] == weights(two)
    assert samewise("eval", folder, "--json").returncode == 0
    assert samewise("check", "experiment=resnet18_digits", "debug=tiny", "model.width=8", f"initialise.weights={latest}").returncode == 0
    damaged = latest / "shards" / "__1_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    done = samewise("digest", latest, code=2)
    assert "__1_0.distcp" in done.stderr


def test_processes_whose_losses_depend_on_different_layers_agree_with_elastic(tmp_path):
    """Both layers have as many weights: torch would add the gradients of one to those of the other, without an error."""
    # AdamW divides by the size of a gradient: with its own eps it makes the rounding of tiny gradients, which both strategies add in
    # another order, as large as a step (2e-2 after four steps); with this one weights agree to 2e-6, as they do with SGD.
    settings = [*MILD, *MORE, "optimizer.eps=1e-3", "checkpoint.every_steps=1"]
    reference = train(tmp_path / "elastic", LEAVES_OUT_A_LAYER, *settings)
    folder = train(tmp_path / "fsdp", LEAVES_OUT_A_LAYER, *settings, *FSDP)
    assert_close(folder, reference, tolerance=1e-5)
    unused = "layer4.1.conv1.weight"
    assert torch.equal(final(folder)[unused], final(reference)[unused]), "weight decay does not move it"


def test_processes_that_call_different_layers_are_refused_before_a_step_is_made(tmp_path):
    job = Job(tmp_path, 2, *MILD, *FSDP, "checkpoint.every_steps=1", before=CALLS_ONE_LAYER)
    assert set(job.wait()) == {2}
    assert "strategy.shard: the processes call different layers" in job.errors
    assert not list(tmp_path.glob("*/*/checkpoints/step-*"))
