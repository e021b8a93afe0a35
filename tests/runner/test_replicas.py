"""The replicas of one process: the sum of their gradients, whatever is accumulated, overlapped or left out."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from samewise.runner.errors import TrainingError
from samewise.runner.strategies.replicas import Exchange, Replicas


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
