"""An order that groups images of similar shape, so that micro-batches padded to their largest image
have little padding.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from samewise.runner.data.order import Shuffled
from samewise.runner.errors import ConfigError, Problem, require_at_least


class GroupedByAspectRatio(Shuffled):
    """A permutation keyed by (seed, epoch) in which, as far as possible, each micro-batch has
    images of one group of aspect ratios.

    As torchvision's references/detection (`GroupedBatchSampler`, `--aspect-ratio-group-factor`):
    the groups are bounded by 2 `factor` + 1 ratios from 1/2 to 2, evenly spaced in the logarithm; a
    micro-batch comes when its group has enough images. What is left at the end of an epoch, fewer
    than a micro-batch of each group, is mixed in the order of the groups; there the reference
    repeats images and leaves others out.

    Args:
        dataset: With `aspect_ratios()`, float64[N]: width / height of each image.
        seed: The experiment's `seed`.
        factor: Into how many groups each octave is divided.
        batch_size: Samples of a step; a micro-batch has batch_size / (replicas * accumulate).
        replicas: The experiment's `replicas`.
        accumulate: The experiment's `accumulate`.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        seed: int,
        factor: int = 3,
        batch_size: int,
        replicas: int = 1,
        accumulate: int = 1,
    ) -> None:
        require_at_least({"loader.order.factor": factor}, least=0)
        described: Any = dataset
        if not hasattr(described, "aspect_ratios"):
            hint = "give it a method aspect_ratios(), or set loader.order=null"
            raise ConfigError(
                Problem(
                    "loader.order",
                    f"{type(dataset).__name__} does not report its images' aspect ratios",
                    hint=hint,
                )
            )
        super().__init__(dataset, seed=seed)
        self._size = max(1, batch_size // (replicas * accumulate))
        self._groups = groups_of(described.aspect_ratios(), factor)

    def indices(self, epoch: int) -> Tensor:
        shuffled = super().indices(epoch)
        group = self._groups[shuffled]
        # An image's rank in its group determines its micro-batch, which is complete once its last
        # image has come.
        order = group.argsort(stable=True)
        counts = group.bincount()
        first = counts.cumsum(0) - counts
        rank = torch.empty_like(group)
        rank[order] = torch.arange(len(group)) - first[group[order]]
        whole = rank < counts[group] // self._size * self._size
        position = torch.arange(len(group))
        last = position.new_zeros(len(group))
        # The position in `order` of the micro-batch's last image
        place = first[group] + rank // self._size * self._size + self._size - 1
        last[whole] = order[place[whole]]
        last[~whole] = len(group) + group[~whole]
        return shuffled[last.argsort(stable=True)]


def groups_of(ratios: Tensor, factor: int) -> Tensor:
    """int64[N]: the group of each of float64[N] aspect ratios.

    With `factor` 0, landscape or portrait.
    """
    bounds = (
        torch.linspace(-1.0, 1.0, 2 * factor + 1, dtype=torch.float64).exp2()
        if factor
        else torch.ones(1, dtype=torch.float64)
    )
    return torch.bucketize(ratios.double(), bounds, right=True)
