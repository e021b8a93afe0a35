"""Grouping by aspect ratio: a function of (seed, epoch), every sample once, micro-batches of one shape."""

from __future__ import annotations

import bisect

import pytest
import torch

from samewise.runner.data.aspect_ratio import GroupedByAspectRatio, groups_of
from samewise.runner.data.order import Shuffled
from samewise.runner.data.plan import Plan


class Shapes:
    """A data set that only has the shapes of its images."""

    def __init__(self, length: int = 500) -> None:
        self.ratios = torch.exp(torch.randn(length, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.5)

    def __len__(self) -> int:
        return len(self.ratios)

    def aspect_ratios(self) -> torch.Tensor:
        return self.ratios


def test_groups_match_the_reference():
    bounds = [2 ** (-1 + step / 3) for step in range(7)]
    ratios = [0.3, 0.5, 0.51, 0.99, 1.0, 1.01, 1.5, 2.0, 3.0, *Shapes().ratios.tolist()]
    assert groups_of(torch.tensor(ratios, dtype=torch.float64), 3).tolist() == [bisect.bisect_right(bounds, ratio + 1e-15) for ratio in ratios]
    assert groups_of(torch.tensor([0.5, 1.0, 1.5]), 0).tolist() == [0, 1, 1]


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 1), (8, 1), (4, 2)])
def test_every_sample_comes_once_and_micro_batches_rarely_mix_groups(replicas: int, accumulate: int):
    data, batch_size = Shapes(), 16
    order = GroupedByAspectRatio(data, seed=3, batch_size=batch_size, replicas=replicas, accumulate=accumulate)
    indices, groups = order.indices(2), groups_of(data.ratios, 3)
    assert sorted(indices.tolist()) == list(range(500))
    size = batch_size // (replicas * accumulate)
    plan = Plan(samples=500, batch_size=batch_size, micro_batches=replicas * accumulate, drop_last=True)
    mixed = 0
    for step in range(plan.steps_per_epoch):
        for number in range(plan.micro_batches):
            _, start, stop = plan.bounds(step, number)
            assert stop - start == size
            mixed += len(set(groups[indices[start:stop]].tolist())) > 1
    assert mixed <= len(groups.unique())  # only the leftovers


def test_an_epoch_is_a_function_of_the_seed_and_its_number():
    orders = [GroupedByAspectRatio(Shapes(), seed=seed, batch_size=8) for seed in (3, 3, 4)]
    assert torch.equal(orders[0].indices(5), orders[1].indices(5))
    orders[1].indices(0)
    assert torch.equal(orders[0].indices(5), orders[1].indices(5))
    assert not torch.equal(orders[0].indices(5), orders[0].indices(6))
    assert not torch.equal(orders[0].indices(5), orders[2].indices(5))


def test_micro_batches_are_filled_as_in_the_reference():
    """A buffer for each group; a micro-batch comes as soon as its buffer is full."""
    data, size = Shapes(60), 4
    groups, buffers, expected = groups_of(data.ratios, 3), {}, []
    for index in Shuffled(data, seed=0).indices(0).tolist():
        buffer = buffers.setdefault(int(groups[index]), [])
        buffer.append(index)
        if len(buffer) == size:
            expected += buffer
            buffer.clear()
    made = GroupedByAspectRatio(data, seed=0, batch_size=size).indices(0).tolist()
    assert made[: len(expected)] == expected
    assert made[len(expected) :] == [index for group in sorted(buffers) for index in buffers[group]]
