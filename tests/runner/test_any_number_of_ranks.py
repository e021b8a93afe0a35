"""The promise of strategy=elastic: the same bits on any number of processes, even if they are killed and their number changes on the way."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from samewise_runner_jobs import TINY, Job, assert_same, run, weights


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """strategy=single: one process that carries all four replicas."""
    return run(tmp_path_factory.mktemp("reference"), 1, "strategy=single")


@pytest.mark.parametrize(
    ("ranks", "further"),
    [(1, []), (2, ["strategy.bucket_mb=0.05"]), pytest.param(4, ["strategy.overlap=false"], marks=pytest.mark.slow), (3, ["strategy.uneven=true"])],
)
def test_any_number_of_ranks_gives_the_same_bits(reference, tmp_path, ranks, further):
    assert_same(run(tmp_path, ranks, *further), reference)


def kill_one(run_root: Path, ranks: int, *, victim: int, step: int) -> None:
    job = Job(run_root, ranks)
    job.wait_for_step(step)
    job.ranks[victim].kill()
    codes = job.wait()
    assert codes[victim] == -signal.SIGKILL
    assert {code for rank, code in enumerate(codes) if rank != victim} == {1}
    assert f"lost rank {victim}, whose process is gone, while" in job.errors
    assert "Traceback" not in job.errors


@pytest.mark.slow
def test_a_run_killed_on_4_ranks_and_on_2_finishes_on_1_with_the_same_bits(reference, tmp_path):
    kill_one(tmp_path, 4, victim=2, step=4)
    kill_one(tmp_path, 2, victim=0, step=8)
    assert_same(run(tmp_path, 1), reference)


def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_step_and_saves(reference, tmp_path):
    job = Job(tmp_path, 2, "checkpoint.every_steps=null", "checkpoint.every_epochs=null", "checkpoint.keep_best=0")
    job.wait_for_step(2)
    os.kill(job.ranks[1].pid, signal.SIGUSR1)
    assert job.wait() == [3, 3], job.errors
    assert job.errors.count("SIGUSR1") == 1
    (kept,) = (int(path.name.removeprefix("step-")) for path in tmp_path.glob("*/*/checkpoints/step-*"))
    assert kept == job.steps()
    assert_same(run(tmp_path, 4), reference)


@pytest.mark.slow
def test_plain_ddp_gives_other_bits(reference, tmp_path):
    """The control: it shows that the tests above can fail."""
    folder = run(tmp_path, 4, "strategy=ddp")
    assert weights(folder) != weights(reference)
    assert folder.name != reference.name
    assert json.loads((folder / "summary.json").read_text())["level"] == "R0"


def test_an_error_in_all_ranks_is_reported_once(tmp_path):
    job = Job(tmp_path, 2, "optimizer.lr=1e30")
    assert set(job.wait()) == {1}
    assert job.errors.count("is not finite") == 1
    assert "Traceback" not in job.errors


def test_an_error_in_one_rank_ends_all_ranks_and_is_reported_once(tmp_path):
    job = Job(tmp_path, 2, "strategy.nproc=3")
    assert set(job.wait()) <= {1, 2}
    assert "3 processes" in job.errors
    assert job.errors.count("error:") == 1


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named(tmp_path):
    job = Job(tmp_path, 4, "strategy.join_timeout_s=6", started=2)
    assert 2 in job.wait()
    assert "rank 2, 3 of 4 did not join within 6 s" in job.errors
    assert job.errors.count("error:") == 1
    assert "Traceback" not in job.errors


def test_an_unresponsive_rank_0_is_named(tmp_path):
    job = Job(tmp_path, 2, "strategy.join_timeout_s=3")
    job.ranks[0].kill()
    codes = job.wait()
    assert codes[1] == 2, job.errors
    assert "rank 0 does not answer within 3 s" in job.errors


@pytest.mark.parametrize(
    ("overrides", "message", "expected"),
    [
        (["strategy.nproc=3"], "3 processes cannot share 4 replicas equally", "1, 2 or 4"),
        (["strategy.nproc=8"], "8 processes cannot share 4 replicas", "1, 2 or 4"),
        (["strategy.nproc=0"], "is too small", "at least 1"),
        (["strategy.backend=smoke"], "no such backend", "gloo or nccl"),
        (["strategy.backend=mpi"], "built without MPI", "gloo or nccl"),
        (["strategy.bucket_mb=0"], "must be greater than 0", ""),
        (["strategy=ddp", "strategy.hook=zip"], "no such hook", "fp16, bf16, powersgd"),
        (["strategy=fsdp", "strategy.shard_size=3"], "does not divide the processes into groups", "a divisor of replicas=4"),
        (["strategy=fsdp", "strategy.offload=disk"], "is not supported", "cpu"),
        (["strategy=ddp", "strategy.rank_invariant=true"], "depends on the number of processes", "strategy=elastic"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(samewise, tmp_path, overrides, message, expected):
    done = samewise("train", *TINY, f"run_root={tmp_path}", *overrides)
    assert done.returncode == 2
    assert message in done.stderr
    assert expected in done.stderr
    assert not list(tmp_path.glob("*/*"))


def test_ddp_with_too_few_processes_is_refused_and_elastic_is_suggested(samewise, tmp_path):
    assert samewise("check", *TINY, f"run_root={tmp_path}", "strategy=ddp").returncode == 0
    done = samewise("train", *TINY, f"run_root={tmp_path}", "strategy=ddp", "strategy.nproc=1")
    assert done.returncode == 2
    assert "4 replicas cannot be carried by 1" in done.stderr
    assert "strategy=elastic" in done.stderr


MORE = {
    "accumulation and clipping": ["accumulate=2", "clip_norm=0.5"],
    "a partial batch that leaves replicas without samples": ["loader.drop_last=false", "batch_size=24", "dataset.samples=50"],
    "bf16, an average of weights, and torchmetrics": ["precision=bf16", "callbacks=ema", "callbacks.ema.every_steps=2", "metrics=[f1,average_precision]"],
    "adamw": ["optimizer=adamw", "~optimizer.momentum", "~optimizer.nesterov"],
    "workers": ["loader.num_workers=2"],
    "mixed training sets, two validation sets": [
        "order=mixed",
        "loader.order.weights={train: 2, train_more: 1}",
        *(f"+dataset.{name}=${{dataset.valid}}" for name in ("train_more", "valid_more")),
    ],
}
COVERED = ("accumulation and clipping", "adamw", "workers")
"""By other tests: of steps against a reference, of each optimizer, and of one process."""


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [pytest.param(given, id=name, marks=[pytest.mark.long] * (name in COVERED)) for name, given in MORE.items()])
def test_further_settings_give_the_same_bits_on_any_number_of_ranks(tmp_path, overrides):
    given = [*overrides, "max_steps=6"]
    alone = run(tmp_path / "alone", 1, "strategy=single", *given)
    for ranks, further in ((2, ["strategy.bucket_mb=0.05"]), (3, ["strategy.uneven=true"])):
        assert_same(run(tmp_path / str(ranks), ranks, *given, *further), alone)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_killed_ten_times_on_changing_numbers_of_ranks_keeps_its_bits(tmp_path):
    alone, root, chance = run(tmp_path / "alone", 1, "max_steps=60"), tmp_path / "killed", random.Random(4)
    for kill in range(10):
        ranks = chance.choice([1, 2, 4])
        job = Job(root, ranks, "max_steps=60", "checkpoint.every_steps=1")
        job.wait_for_step(5 * (kill + 1))
        job.ranks[chance.randrange(ranks)].kill()
        job.wait()
        assert "Traceback" not in job.errors
    assert_same(run(root, 2, "max_steps=60"), alone)
