"""The sum over replicas has one order, whichever process carries which replica."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from samewise.runner.errors import TrainingError
from samewise.runner.strategies.base import Tally, add_tallies
from samewise.runner.strategies.replicas import Exchange, Replicas
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


class Overlapped(Exchange):
    """An exchange of one process that overlaps like one between several."""

    overlaps = True


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.body, self.norm, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.norm(self.body(value) * self.frozen)).square().sum()


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, number: int) -> Tensor:
    return 10.0**number * torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + number))


def expected(model: Net, step: int, numbers: Sequence[int], accumulate: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and buffers by a tournament of whole models."""
    grads, kept, start = [], None, {name: value.clone() for name, value in model.named_buffers()}
    for replica in range(3):
        model.load_state_dict(start, strict=False)
        model.zero_grad()
        for number in range(replica * accumulate, (replica + 1) * accumulate):
            if number in numbers:
                model(batch(step, number)).backward()
        kept = kept or {name: value.clone() for name, value in model.named_buffers()}
        grads.append({name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in model.named_parameters()})
    return {name: (grads[0][name] + grads[1][name]) + grads[2][name] for name in grads[0]}, kept or {}


@pytest.mark.parametrize("exchange", [Exchange, Overlapped])
@pytest.mark.parametrize("bucket_mb", [0.0, 1.0])
@pytest.mark.parametrize(("accumulate", "numbers"), [(1, (0, 1, 2)), (2, (0, 1, 2, 3, 4, 5)), (2, (1, 2, 5)), (1, (0, 2)), (1, (0, 1)), (1, (1,))])
def test_the_sum_equals_that_of_a_tournament_at_every_step(exchange: type[Exchange], bucket_mb: float, accumulate: int, numbers: tuple[int, ...]) -> None:
    model, other = network(), network()
    replicas = Replicas(model, range(3), accumulate=accumulate, exchange=exchange(), bucket_mb=bucket_mb)
    for step in range(3):
        model.zero_grad()
        for number in numbers:
            with replicas.micro_batch(number):
                model(batch(step, number)).backward()
        replicas.give_back([replicas.close()])
        grads, buffers = expected(other, step, numbers, accumulate)
        other.load_state_dict(buffers, strict=False)
        for name, parameter in model.named_parameters():
            if name.startswith(("unused", "frozen")):
                assert parameter.grad is None
            else:
                assert torch.equal(parameter.grad, grads[name]), f"step {step}: {name}"
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[name]), f"step {step}: {name}"
        model.head(batch(step, 9)).sum().backward()  # a user's own backward pass, outside of a step: nothing of it is sent


def test_nothing_is_added_to_the_gradients_of_the_carried_replicas() -> None:
    """Not even zero, which would turn -0 into 0."""
    weight = nn.Parameter(torch.zeros(3))
    model = nn.ParameterList([weight])
    replicas = Replicas(model, range(2), accumulate=1, exchange=Exchange(), bucket_mb=1.0)
    for number in range(2):
        with replicas.micro_batch(number):
            weight.grad = torch.full((3,), -0.0)
    replicas.give_back([replicas.close()])
    assert weight.grad is not None
    assert torch.signbit(weight.grad).all()


def test_a_rank_with_later_replicas_counts_from_its_own_first() -> None:
    model, other = network(), network()
    replicas = Replicas(model, range(2, 4), accumulate=2, exchange=Overlapped(), bucket_mb=0.0)
    for number in range(4, 8):
        with replicas.micro_batch(number):
            model(batch(0, number)).backward()
    replicas.give_back([replicas.close()])
    start = {name: value.clone() for name, value in other.named_buffers()}
    grads = []
    for replica in (2, 3):
        other.load_state_dict(start, strict=False)
        other.zero_grad()
        for number in (2 * replica, 2 * replica + 1):
            other(batch(0, number)).backward()
        grads.append(other.body.weight.grad)
        other.body.weight.grad = None
    assert torch.equal(model.body.weight.grad, grads[0] + grads[1])
    assert torch.equal(model.norm.running_mean, start["norm.running_mean"]), "replica 0 is carried elsewhere"


def test_a_gradient_after_its_bucket_was_sent_is_reported() -> None:
    model = network()
    replicas = Replicas(model, range(1), accumulate=1, exchange=Overlapped(), bucket_mb=0.0)
    with replicas.micro_batch(0):
        model(batch(0, 0)).backward()
        model(batch(0, 1)).backward()
    with pytest.raises(TrainingError, match="had a gradient twice") as caught:
        replicas.close()
    assert (caught.value.problems[0].path, caught.value.problems[0].value) == ("strategy.overlap", True)
