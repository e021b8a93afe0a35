"""Without ranks: which modules a setting matches, the index of shards, and which micro-batches have samples."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from samewise.runner.errors import ConfigError
from samewise.runner.records import shards
from samewise.runner.strategies.fsdp import FSDP
from samewise.runner.strategies.packing import pack, unpack
from samewise.runner.strategies.recompute import match_modules
from samewise.runner.strategies.sharding import require_no_parameter_hooks
from samewise.runner.strategies.simulated import simulate_ranks


class Net(nn.Module):
    """A stem, two blocks in a list, and a head whose weight is the stem's."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)
        if tied:
            self.head.weight = self.stem.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.stem(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def test_modules_are_matched_by_class_or_name():
    net = Net()
    assert [name for name, _ in match_modules(net, ["Sequential"], "strategy.shard")] == ["blocks.0", "blocks.1"]
    assert [name for name, _ in match_modules(net, ["head", "blocks.1"], "strategy.shard")] == ["blocks.1", "head"]
    assert [name for name, _ in match_modules(net, "head", "strategy.shard")] == ["head"]
    with pytest.raises(ConfigError, match=r"strategy\.shard.*matches no module(.|\n)*did you mean 'Sequential'"):
        match_modules(net, ["Sequental"], "strategy.shard")
    with pytest.raises(ConfigError, match=r"never called(.|\n)*blocks\.\*"):
        match_modules(net, ["blocks"], "strategy.shard")


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(method: str):
    net = Net()
    getattr(net.stem.weight, method)(lambda gradient: None)
    with pytest.raises(ConfigError, match="has a parameter with hooks") as caught:
        require_no_parameter_hooks(net)
    assert "stem.weight" in str(caught.value)


@pytest.mark.parametrize("command", ["torch.hub\nload", "os\nsystem", "torch\nload", "pathlib\nos", "torch.distributed.checkpoint.metadata\nos"])
def test_an_index_of_shards_cannot_run_code(tmp_path: Path, command: str):
    index = tmp_path / ".metadata"
    index.write_bytes(f"c{command}\n(S'true'\ntR.".encode())
    with open(index, "rb") as handle, pytest.raises(pickle.UnpicklingError, match="is not allowed in it"):
        shards.Index(handle).load()


VALUE = torch.ones(2, 3)


def wrap(model: nn.Module, shard: list[str]) -> nn.Module:
    strategy = FSDP(shard=shard)
    strategy.begin("cpu", 2, 1)
    return strategy.wrap(model)


@pytest.mark.fsdp
@pytest.mark.parametrize("shard", [[], ["0"]], ids=["the model", "a unit"])
def test_a_gradient_of_a_gradient_through_a_unit_is_refused(shard: list[str]) -> None:
    value = VALUE.clone().requires_grad_()
    with simulate_ranks(0, 2):
        total = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), shard)(value).sum()
        with pytest.raises(ConfigError, match="differentiates a gradient") as caught:
            torch.autograd.grad(total, value, create_graph=True)
    assert "'Sequential'" in str(caught.value), "the first that it passes through"


def test_packed_tensors_come_out_unchanged() -> None:
    tensors = [
        torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        torch.tensor(7),
        torch.randn(5, dtype=torch.float64),
        torch.randn(6, 2).T,
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(2, 1),
    ]
    flat, offsets = pack(tensors)
    assert flat.dtype is torch.uint8
    assert offsets == [0, 432, 448, 496, 544, 560]
    assert len(flat) == 576
    for before, after in zip(tensors, unpack(flat, tensors, offsets), strict=True):
        assert torch.equal(before, after)
        assert (before.dtype, before.stride()) == (after.dtype, after.stride())
        assert after.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr(), "it has memory of its own"


def test_a_gap_between_tensors_is_zero() -> None:
    flat, offsets = pack([torch.full((3,), 255, dtype=torch.uint8), torch.full((2,), 255, dtype=torch.uint8)])
    assert offsets == [0, 16]
    assert flat.tolist() == [255] * 3 + [0] * 13 + [255] * 2 + [0] * 14
