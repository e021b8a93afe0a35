"""Batch norms over all replicas: by torch's SyncBatchNorm under strategy=ddp, on CUDA; by replicas side by side under elastic and single."""

import json
from copy import deepcopy

import pytest
import torch
from samewise_runner_jobs import TINY as RANKS
from samewise_runner_jobs import assert_same, run
from samewise_tiny import DIGITS
from torch import nn
from torch.nn import functional

from samewise.runner.data.loading import MicroBatch
from samewise.runner.strategies.lockstep import run_side_by_side
from samewise.runner.strategies.sync_batch_norm import meet_in_batch_norms

TINY = [*DIGITS, "model.width=8", "replicas=2", "batch_size=16"]
SYNCHRONISED = ["strategy.sync_batch_norm=true", "accumulate=2", "max_steps=4", "callbacks=ema"]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=None, affine=False), nn.BatchNorm2d(8, track_running_stats=False)])
def test_replicas_side_by_side_equal_one_batch_norm_over_the_whole_batch(norm):
    torch.manual_seed(0)
    images, labels = torch.randn(24, 3, 8, 8).double() + 3, torch.randint(5, (24,))
    model = nn.Sequential(nn.Conv2d(3, 8, 3), deepcopy(norm), nn.ReLU(), nn.Conv2d(8, 8, 3), deepcopy(norm), nn.Flatten(), nn.Linear(128, 5)).double()
    whole = deepcopy(model)
    expected = functional.cross_entropy(whole(images), labels, reduction="sum")
    expected.backward()

    def forward(micro):
        torch.manual_seed(micro.number)
        own = slice(6 * micro.number, 6 * micro.number + 6)
        loss = functional.cross_entropy(model(images[own]), labels[own], reduction="sum")
        assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(micro.number))
        return loss, torch.ones_like(loss), lambda: loss.detach()

    meet_in_batch_norms(model)
    micro_batches = [MicroBatch(number, None) for number in range(4)]
    total = 0.0
    for state, loss in run_side_by_side(model, micro_batches, forward, lambda values: values):
        state.give()
        total += loss()
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close([x.grad for x in model.parameters()], [x.grad for x in whole.parameters()], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close([*model.buffers()], [*whole.buffers()], rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run(tmp_path_factory.mktemp("single"), 1, "strategy=single", *SYNCHRONISED)


@pytest.mark.parametrize(
    ("ranks", "further"), [(2, ["activation_checkpointing=[BasicBlock]"]), pytest.param(3, ["strategy.uneven=true"], marks=pytest.mark.slow)]
)
def test_any_number_of_processes_normalises_over_the_whole_batch_with_the_same_bits(single, tmp_path, ranks, further):
    assert_same(run(tmp_path, ranks, *SYNCHRONISED, *further), single)
    assert json.loads((single / "summary.json").read_text())["level"] == "R2"


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["loader.drop_last=false", "batch_size=24", "dataset.samples=50"], "batch norms cannot be synchronised if a replica has no samples"),
        (["compile=default"], "cannot be synchronised in a compiled model"),
    ],
)
def test_what_it_cannot_do_is_refused(samewise, tmp_path, further, message):
    done = samewise("train", *RANKS, "strategy=single", "strategy.sync_batch_norm=true", f"run_root={tmp_path}", *further, code=2)
    assert message in done.stderr


def test_check_refuses_it_without_cuda(samewise):
    done = samewise("check", *TINY, "strategy=ddp", "strategy.sync_batch_norm=true", "device=cpu", code=2)
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
