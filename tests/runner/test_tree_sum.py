"""The sum over replicas has one order, whichever process carries which replica."""

import pytest
import torch
from torch import nn

from samewise.runner.strategies.base import Tally, add_tallies
from samewise.runner.strategies.tree import Bucket, ReplicaBuffers, additions, buckets, subtrees


def tree(values: list[torch.Tensor]) -> torch.Tensor:
    """The same sum, written naively."""
    while len(values) > 1:
        values = [values[place] + values[place + 1] if place + 1 < len(values) else values[place] for place in range(0, len(values), 2)]
    return values[0]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16])
def test_gradients_are_added_in_the_order_of_a_tournament(replicas):
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


@pytest.mark.parametrize("replicas", range(1, 14))
def test_the_sums_of_subtrees_on_ranks_add_up_to_the_tournament(replicas):
    values = [torch.randn(100, generator=torch.Generator().manual_seed(number)) * 3.0**number for number in range(replicas)]
    for ranks in range(1, replicas + 1):
        parts = subtrees(replicas, ranks)
        assert len(parts) == ranks
        assert [number for part in parts for number in part] == list(range(replicas))
        if (replicas / ranks).hex().startswith("0x1.0000000000000p"):
            assert {len(part) for part in parts} == {replicas // ranks}, "a power of two each"
        sums = [tree([values[number] for number in part]) for part in parts]
        for left, right in additions(parts):
            sums[left] = sums[left] + sums[right]
        assert torch.equal(sums[0], tree(list(values)))


@pytest.mark.parametrize(("replicas", "buffers"), [(1, 1), (2, 2), (3, 2), (6, 3), (8, 4)])
def test_a_step_leaves_nothing_to_the_next_and_buffers_are_reused(replicas, buffers):
    used, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    bucket, made = Bucket([used, other], shards=1), []
    new = bucket.new_buffer
    bucket.new_buffer = lambda: made.append(1) or new()
    for step in range(4):
        assert (bucket.added, bucket.touched) == (0, [False, False])
        for number in range(replicas):
            used.grad, other.grad = torch.full((3,), 1.0 + step), torch.ones(2) if step == 1 else None
            bucket.add()
            assert bucket.added == number + 1
        bucket.give_back(bucket.total(), bucket.touched)
        assert used.grad.tolist() == [replicas * (1.0 + step)] * 3
        assert (other.grad is None) == (step != 1)
    assert len(made) == buffers, "log2(replicas) + 1"
    assert len(made) == replicas.bit_length(), "as Replicas.buffer_bytes has it"
    used.grad = other.grad = None


MIB = 2**20


@pytest.mark.parametrize(
    ("megabytes", "expected"),
    [
        (4096 / MIB, [[3], [2], [1], [0]]),
        (4096.5 / MIB, [[3, 2], [1], [0]]),
        (8192 / MIB, [[3, 2], [1], [0]]),
        (1, [[3, 2], [1], [0]]),
        (0.0, [[3], [2], [1], [0]]),
    ],
)
def test_buckets_are_filled_from_the_last_parameter_and_hold_one_dtype(megabytes, expected):
    parameters = [nn.Parameter(torch.zeros(1024, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32, torch.float32)]
    number = {id(parameter): place for place, parameter in enumerate(parameters)}
    made = buckets(parameters, megabytes=megabytes, shards=1)
    assert [[number[id(parameter)] for parameter in bucket.parameters] for bucket in made] == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shards", [1, 3])
def test_each_gradient_is_aligned_and_the_length_is_a_multiple_of_the_shards(shards, dtype):
    bucket = Bucket([nn.Parameter(torch.zeros(count, dtype=dtype), requires_grad=False) for count in (3, 129, 1, 500)], shards=shards)
    flat = bucket.new_buffer()
    start = flat.tensor.data_ptr()
    assert [(view.data_ptr() - start) % 512 for view in flat.views] == [0, 0, 0, 0]
    assert bucket.length % shards == 0
    assert 0 <= bucket.length * dtype.itemsize - sum(-(-count * dtype.itemsize // 512) * 512 for count in (3, 129, 1, 500)) < shards * 512


def test_a_left_to_right_sum_would_differ():
    values = [torch.randn(1000, generator=torch.Generator().manual_seed(number)) for number in range(8)]
    left = values[0].clone()
    for value in values[1:]:
        left += value
    assert not torch.equal(left, tree(values))


def test_batch_norm_follows_replica_0_and_each_replica_starts_the_same():
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
    with pytest.raises(ValueError, match="argument"):
        buffers.set(buffers.tensors[:1])


def test_batch_norm_is_unchanged_if_another_process_carries_replica_0():
    model = nn.BatchNorm1d(4).train()
    buffers = ReplicaBuffers(model)
    for step in range(2):
        model.running_mean.fill_(step)
        for replica in (1, 2):
            buffers.begin(replica)
            assert model.running_mean.tolist() == [step] * 4
            model(torch.randn(8, 4))
        buffers.finish()
        assert model.running_mean.tolist() == [step] * 4
    buffers.finish()
    assert model.running_mean.tolist() == [1] * 4


def test_tallies_are_weighted_by_their_counts():
    total = add_tallies([Tally(3, 8, {"loss": 6.0}), Tally(1, 8, {"loss": 4.0})])
    assert total.means() == {"loss": 2.5}
    assert total.weight == 0.5
