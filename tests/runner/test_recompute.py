"""activation_checkpointing: recomputing activations in the backward pass changes no bit, whatever a module draws or counts, under every strategy."""

import copy
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from samewise_runner_jobs import run, weights
from torch import Tensor, nn

from samewise.runner.records.digest import digests, value_digest
from samewise.runner.strategies.recompute import recompute

PATH = "activation_checkpointing"


class Draws(nn.Module):
    """Scales by draws from three generators and by the number of calls, which it counts."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return (inputs * self.weight).tanh() * (torch.rand(()) + random.random() + np.random.rand() + self.calls)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Dropout(0.5), Draws(), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def train(net: Net) -> tuple[list[int], list[int], list[float]]:
    """The gradients and the state after two micro-batches that follow each other as in a pipeline, and the next draws of the generators."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    losses = [net(inputs).square().sum() for inputs in torch.randn(2, 16, 8)]
    for loss in losses:
        loss.backward()
    left = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return digests(parameter.grad for parameter in net.parameters()), digests(net.state_dict().values()), left


def test_recomputing_keeps_gradients_buffers_and_generators() -> None:
    torch.manual_seed(0)
    once = Net()
    twice = copy.deepcopy(once)
    called: list[nn.Module] = []
    recompute(twice, ["blocks.[01]"], PATH)
    for net in (once, twice):
        net.blocks[0][1].register_forward_hook(lambda module, *_: called.append(module))
    assert train(once) == train(twice)
    assert list(once.state_dict()) == list(twice.state_dict())
    assert int(twice.blocks[0][1].num_batches_tracked) == 2
    assert float(twice.blocks[0][3].calls) == 2
    assert [called.count(net.blocks[0][1]) for net in (once, twice)] == [2, 4], "it is computed twice for each micro-batch"


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5))
        self.outer = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.outer(self.inner(x)).sum(), x, create_graph=True)
        return slope.square().sum()


def test_recomputing_keeps_second_derivatives_which_compute_a_module_more_often() -> None:
    torch.manual_seed(0)
    once = Penalised()
    twice = copy.deepcopy(once)
    recompute(twice, ["inner"], PATH)
    for net in (once, twice):
        torch.manual_seed(1)
        net(torch.randn(16, 8)).backward()
    assert [*map(value_digest, once.state_dict().values())] == [*map(value_digest, twice.state_dict().values())]
    gradients = [[value_digest(one.grad) for one in net.parameters() if one.grad is not None] for net in (once, twice)]
    assert gradients[0] == gradients[1]
    assert len(gradients[0]) >= 4


MILD = ["replicas=2", "optimizer.lr=0.01", "max_steps=3", "callbacks=none", "evaluate.pictures=false", "initialise.frozen=[conv1.*]"]
CASES = {
    "single": (1, ["strategy=single"]),
    "elastic": (2, ["strategy=elastic"]),
    "ddp": (2, ["strategy=ddp"]),
    "pipeline": (2, ["strategy=pipeline", "replicas=1", "accumulate=2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASES)
def test_recomputing_keeps_the_bits_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    """Under fsdp and rpc tests of these do so."""
    ranks, options = CASES[strategy]
    more = ["precision=bf16", "memory_format=channels_last"] if strategy in ("single", "elastic") else []
    once = run(tmp_path / "once", ranks, *MILD, *options, *more)
    twice = run(tmp_path / "twice", ranks, *MILD, *options, *more, "activation_checkpointing=[BasicBlock]")
    assert weights(twice) == weights(once)
    assert (twice / "trace.jsonl").read_bytes() == (once / "trace.jsonl").read_bytes()
    assert twice.name == once.name, "it changes no result, so it is no other experiment"
