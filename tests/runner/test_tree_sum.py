"""The sum over replicas has one order, whatever process carries which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samewise.runner.strategies.base import Tally, add_tallies
from samewise.runner.strategies.tree import Bucket, ReplicaBuffers


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    """The same sum, written naively."""
    while len(values) > 1:
        values = [values[place] + values[place + 1] if place + 1 < len(values) else values[place] for place in range(0, len(values), 2)]
    return values[0]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16])
def test_gradients_are_added_as_a_tournament(replicas):
    model = nn.Linear(30, 20)
    parameters = list(model.parameters())
    total, seen = Bucket(parameters, shards=1), []
    for number in range(replicas):
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0**number
        seen.append(torch.cat([parameter.grad.reshape(-1) for parameter in parameters]))
        total.add()
    total.give_back(total.total(), [True, True])
    assert torch.equal(torch.cat([parameter.grad.reshape(-1) for parameter in parameters]), tree(seen))


@pytest.mark.parametrize("shards", [1, 3])
def test_each_gradient_is_aligned_as_if_alone_and_the_whole_is_a_multiple_of_the_shards(shards):
    bucket = Bucket([nn.Parameter(torch.zeros(count)) for count in (3, 129, 1, 500)], shards=shards)
    flat = bucket.new_buffer()
    start = flat.tensor.data_ptr()
    assert [(view.data_ptr() - start) % 512 for view in flat.views] == [0, 0, 0, 0]
    assert bucket.length % shards == 0
    assert bucket.length >= 3 + 129 + 1 + 500


def test_a_left_to_right_sum_would_differ():
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(number)) for number in range(8)]
    left = values[0].clone()
    for value in values[1:]:
        left += value
    assert not torch.equal(left, tree(values))


def test_a_parameter_without_a_gradient_stays_without_one():
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    total = Bucket([used, unused], shards=1)
    for _ in range(2):
        used.grad = torch.ones(3)
        total.add()
    total.give_back(total.total(), total.touched)
    assert torch.equal(used.grad, torch.full((3,), 2.0))
    assert unused.grad is None


def test_batch_norm_follows_replica_0_and_each_replica_starts_alike():
    model = nn.BatchNorm1d(4).train()
    buffers = ReplicaBuffers(model)
    alone = nn.BatchNorm1d(4).train()
    inputs = [torch.randn(8, 4, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    alone(inputs[0])
    for replica in range(3):
        buffers.begin(replica)
        assert torch.equal(model.running_mean, torch.zeros(4))
        model(inputs[replica])
    buffers.finish()
    assert torch.equal(model.running_mean, alone.running_mean)
    assert torch.equal(model.num_batches_tracked, alone.num_batches_tracked)


def test_tallies_weigh_by_their_counts():
    total = add_tallies([Tally(3, 8, {"loss": 6.0}), Tally(1, 8, {"loss": 4.0})])
    assert total.means() == {"loss": 2.5}
    assert total.weight == 0.5
