"""What torch's DistributedDataParallel offers, each on real ranks over gloo: hooks, uneven inputs, optimizer state in shards, timeouts."""

import json
from pathlib import Path

import pytest
import torch
from samewise_runner_jobs import Job, run, weights
from samewise_tiny import work_in_project

from samewise.runner.records import checkpoint, trace_reader

pytestmark = pytest.mark.slow

# Few steps at a small rate: rounding has no time to grow, and mistakes are far larger than rounding.
MILD = ["strategy=ddp", "replicas=2", "optimizer.lr=0.01", "max_steps=6", "callbacks=none", "evaluate.pictures=false"]
LAST_BATCH_OF_TWO = ["replicas=4", "loader.drop_last=false", "batch_size=24", "dataset.samples=50"]
"""Two of four processes have no sample in the last step of an epoch."""


def distance(folder: Path, other: Path, *, to_the_end: bool = True) -> float:
    """The largest relative difference between the losses of two runs, step by step; with `to_the_end` also of their final loss on the validation split."""
    one, two = ([float.fromhex(line["loss"]) for line in trace_reader.read_trace(path / "trace.jsonl")[1]] for path in (folder, other))
    assert len(one) == len(two) == 6
    if to_the_end:
        one[6:], two[6:] = ([json.loads((path / "summary.json").read_text())["metrics"]["final"]["valid/loss"]] for path in (folder, other))
    return max(abs(a - b) / b for a, b in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DDP on two ranks with nothing else."""
    return run(tmp_path_factory.mktemp("plain"), 2, *MILD)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that carries both replicas."""
    return run(tmp_path_factory.mktemp("alone"), 1, *MILD, "strategy=single")


def test_ddp_agrees_with_one_process(plain, alone):
    assert distance(plain, alone) < 1e-5
    assert json.loads((plain / "summary.json").read_text())["level"] == "R0"


@pytest.mark.parametrize(("hook", "least", "most"), [pytest.param("fp16", 1e-7, 1e-2, marks=pytest.mark.long), ("bf16", 1e-6, 1e-2), ("powersgd", 1e-5, 0.2)])
def test_hooks_compress_the_gradients_and_stay_close(plain, tmp_path, hook, least, most):
    found = distance(run(tmp_path, 2, *MILD, f"strategy.hook={hook}", "strategy.powersgd_start_step=2"), plain)
    assert least < found < most


@pytest.mark.parametrize("further", [["accumulate=2"], ["strategy.hook=bf16"], ["strategy.static_graph=true"]])
def test_a_last_batch_with_fewer_samples_than_processes_is_trained_on(tmp_path, further):
    """Without more settings a case of tests/steps does so."""
    ranks = run(tmp_path / "ddp", 4, *MILD, *LAST_BATCH_OF_TWO, *further)
    of_one = [option for option in further if not option.startswith("strategy.")]
    one = run(tmp_path / "alone", 1, *MILD, *LAST_BATCH_OF_TWO, *of_one, "strategy=single")
    # after the last step Join gives all processes the batch statistics of the last one; a single process keeps those of the first
    found = distance(ranks, one, to_the_end=False)
    assert found < (1e-2 if "strategy.hook=bf16" in further else 1e-3)


def test_a_checkpoint_of_sharded_optimizer_state_equals_the_whole_one(plain, tmp_path):
    sharded = run(tmp_path, 2, *MILD, "strategy.zero=true")
    one, two = (checkpoint.load(folder / "checkpoints" / "latest")["optimizers"]["train"] for folder in (sharded, plain))
    assert one["param_groups"] == two["param_groups"]
    assert one["state"].keys() == two["state"].keys()
    assert all(torch.equal(one["state"][number]["momentum_buffer"], two["state"][number]["momentum_buffer"]) for number in two["state"])


def test_sharded_optimizer_state_resumes_on_two_ranks_with_the_same_bits(plain, tmp_path):
    job = Job(tmp_path, 2, *MILD, "strategy.zero=true", "checkpoint.every_steps=1")
    job.wait_for_step(3)
    job.ranks[0].kill()
    job.wait()
    assert weights(run(tmp_path, 2, *MILD, "strategy.zero=true", "checkpoint.every_steps=1")) == weights(plain)


OWN_HOOK = """
import torch
import torch.distributed as dist

class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        scaled = bucket.buffer().mul_(self.factor / dist.get_world_size())
        return dist.all_reduce(scaled, async_op=True).get_future().then(lambda future: future.value()[0])
"""


def test_a_hook_of_ones_own_exchanges_the_gradients(plain, tmp_path, monkeypatch):
    work_in_project(tmp_path, monkeypatch, "own", OWN_HOOK)
    hook = "strategy.hook={_target_: own.Scaled, factor: FACTOR}"
    once, twice = (run(tmp_path / factor, 2, *MILD, hook.replace("FACTOR", factor)) for factor in ("1.0", "2.0"))
    assert distance(once, plain) < 1e-5
    lines = [[json.loads(line).get("metrics", {}) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (plain, once, twice)]
    norms = [next(filter(None, (metrics.get("train/gradient_norm") for metrics in rows))) for rows in lines]
    assert norms == pytest.approx([norms[0], norms[0], 2 * norms[0]], rel=1e-5)


DROPPING = """
import os
from torch import nn

class Dropping(nn.Module):
    # a rank that leaves out a layer never has gradients for which the other waits

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images):
        x = self.body(images.flatten(1))
        return self.head(self.extra(x) if os.environ["RANK"] == "0" or not self.training else x)
"""


def test_a_rank_that_leaves_out_a_layer_ends_the_run_with_its_name_instead_of_a_wait(tmp_path, monkeypatch):
    work_in_project(tmp_path, monkeypatch, "own", DROPPING, {"model/own": "# A model\n_target_: own.Dropping\n"})
    given = ["recipe=classification", "model=own", "dataset=digits", "transforms=images", "batch_size=32", "max_steps=1", "tracking=none", "evaluate.limit=1"]
    job = Job(tmp_path / "runs", 2, *MILD, "max_steps=1", "--config-dir", "configs", experiment=given)
    assert 0 not in job.wait()
    assert "the loss does not depend on extra.weight, extra.bias, for which DDP waits" in job.errors
    assert "strategy.find_unused_parameters=true" in job.errors
