"""Grouping by aspect ratio: a function of (seed, epoch), every sample once, micro-batches of one shape."""

import bisect

import torch

from samewise.runner.data.aspect_ratio import GroupedByAspectRatio, groups_of


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


def test_an_epoch_is_a_function_of_the_seed_and_its_number():
    orders = [GroupedByAspectRatio(Shapes(), seed=seed, batch_size=8) for seed in (3, 3, 4)]
    assert torch.equal(orders[0].indices(5), orders[1].indices(5))
    orders[1].indices(0)
    assert torch.equal(orders[0].indices(5), orders[1].indices(5))
    assert not torch.equal(orders[0].indices(5), orders[0].indices(6))
    assert not torch.equal(orders[0].indices(5), orders[2].indices(5))
