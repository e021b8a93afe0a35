"""SyncBatchNorm: strategy=ddp converts the batch norms of a model, on CUDA; elsewhere it is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from samewise_runner_jobs import run
from samewise_tiny import DIGITS

TINY = [*DIGITS, "model.width=8", "replicas=2", "batch_size=16"]


@pytest.mark.parametrize("strategy", ["single", "elastic"])
def test_strategies_that_promise_bits_on_any_number_of_ranks_refuse_it(samewise, strategy, tmp_path):
    done = samewise("train", *TINY, f"strategy={strategy}", "strategy.sync_batch_norm=true", f"run_root={tmp_path}")
    assert done.returncode == 2
    assert f"strategy.sync_batch_norm: strategy={strategy} gives each replica batch statistics of its own" in done.stderr
    assert "strategy=ddp strategy.sync_batch_norm=true" in done.stderr


def test_check_refuses_it_without_cuda(samewise):
    done = samewise("check", *TINY, "strategy=ddp", "strategy.sync_batch_norm=true", "device=cpu")
    assert done.returncode == 2
    assert "strategy.sync_batch_norm: torch's SyncBatchNorm computes on CUDA devices only" in done.stderr


@pytest.mark.gpu
def test_two_processes_normalise_over_the_whole_batch(tmp_path):
    """Like one process with the whole batch, up to the order of sums; and with the same bits each time."""
    unchanged = ["transforms.degrees=0", "transforms.translate=[0,0]", "transforms.scale=[1,1]", "device=cuda", "max_steps=1"]  # drawn for each micro-batch
    ddp = ["strategy=ddp", "replicas=2", "strategy.share_devices=true", *unchanged]
    made = {
        "whole": run(tmp_path / "whole", 1, "strategy=single", "replicas=1", *unchanged),
        "apart": run(tmp_path / "apart", 2, *ddp),
        "synchronised": run(tmp_path / "synchronised", 2, *ddp, "strategy.sync_batch_norm=true"),
        "again": run(tmp_path / "again", 2, *ddp, "strategy.sync_batch_norm=true"),
    }
    states = {name: torch.load(folder / "checkpoints" / "latest" / "state.pt", weights_only=True)["model"] for name, folder in made.items()}
    assert list(states["synchronised"]) == list(states["whole"])
    means = {name: state["bn1.running_mean"] for name, state in states.items()}
    assert torch.allclose(means["synchronised"], means["whole"], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(means["apart"], means["whole"], rtol=1e-4, atol=1e-6)
    summaries = {name: json.loads((folder / "summary.json").read_text()) for name, folder in made.items()}
    assert summaries["synchronised"]["weights_sha256"] == summaries["again"]["weights_sha256"]
    assert summaries["synchronised"]["level"] == "R0"
