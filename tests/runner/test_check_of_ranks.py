"""`samewise check strategy...` tries the setup of any number of processes in one; and one process replays what hundreds would compute."""

import json
import os

import pytest
import torch.distributed as dist
from samewise_tiny import DIGITS

from samewise.runner.training import dry_run

TINY = [*DIGITS, "model.width=4"]
MANY = ["replicas=512", "batch_size=512", "dataset.samples=512"]


def notes(samewise, *overrides: str) -> str:
    done = samewise("check", *TINY, *overrides, "--json", code=0)
    assert not dist.is_initialized()
    assert "RANK" not in os.environ
    return "\n".join(json.loads(done.stdout)["notes"])


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (["strategy=elastic", "strategy.nproc=512"], ["512 processes", "rank 0 takes micro-batch 0, rank 511 micro-batch 511", "1 bucket"]),
        (["strategy=elastic", "strategy.nproc=128"], ["128 processes", "rank 0 takes micro-batches 0 to 3, rank 127 micro-batches 508 to 511"]),
        (["strategy=ddp", "clip_norm=1"], ["512 processes", "rank 511 micro-batch 511"]),
    ],
    ids=["elastic", "several replicas each", "ddp"],
)
def test_a_setup_of_512_ranks_is_tried_without_building_each(samewise, monkeypatch, strategy, told) -> None:
    built, build = list[object](), dry_run.build
    monkeypatch.setattr(dry_run, "build", lambda *given, **more: built.append(given) or build(*given, **more))
    said = notes(samewise, *MANY, *strategy)
    assert all(words in said for words in told), said
    assert len(built) == 1


def test_the_settings_and_cut_of_a_pipeline_are_checked(samewise) -> None:
    assert "2 processes" in notes(samewise, "strategy=pipeline", "accumulate=2")
    done = samewise("check", *TINY, "strategy=pipeline", "strategy.schedule=1f1b", code=2)
    assert "accumulate=2" in done.stderr


@pytest.mark.slow
def test_one_process_replays_what_512_ranks_would_compute(samewise, tmp_path) -> None:
    """test_any_number_of_ranks.py shows that one process computes what several do; this test shows that 512 are not too many for it."""
    model = ["model=resnet20_cifar", "model.depth=8", "model.width=2"]
    overrides = [*MANY, *model, "strategy=elastic", "max_steps=1", f"run_root={tmp_path}"]
    done = samewise("train", *TINY, *overrides, "--json", code=0)
    assert json.loads(done.stdout)["level"] == "R2"
