"""Order that groups images of similar shape.

Micro-batches, which are padded to their largest image, then have little padding.
"""

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from samewise.runner.data.order import Order, shuffled
from samewise.runner.errors import ConfigError, require_at_least


class GroupedByAspectRatio(Order):
    """Permutation keyed by (seed, epoch) whose micro-batches hold images of similar aspect ratio.

    As in torchvision's references/detection (`GroupedBatchSampler`, `--aspect-ratio-group-factor`),
    the groups are bounded by 2 `factor` + 1 ratios from 1/2 to 2, evenly spaced in the logarithm,
    and a micro-batch is complete as soon as its group has enough images. At the end of an epoch
    each group leaves fewer images than a micro-batch; they are mixed in the order of the groups.
    (The reference repeats some images and drops others there.)

    Args:
        dataset: Data set with a method `aspect_ratios()` that returns float64[N]: width / height of
            each image.
        seed: The experiment's `seed`.
        factor: Number of groups per octave of aspect ratios.
        batch_size: Samples of a step; a micro-batch has batch_size / (replicas * accumulate).
        replicas: The experiment's `replicas`.
        accumulate: The experiment's `accumulate`.

    Raises:
        ConfigError: `factor` is negative, or the data set has no `aspect_ratios()`.
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
        ConfigError.raise_if(
            not hasattr(described, "aspect_ratios"),
            "loader.order",
            f"{type(dataset).__name__} does not report its images' aspect ratios",
            hint="give it a method aspect_ratios(), or set loader.order=null",
        )
        self._shuffled = shuffled(dataset, seed=seed)
        self._size = max(1, batch_size // (replicas * accumulate))
        self._groups = groups_of(described.aspect_ratios(), factor)

    def __len__(self) -> int:
        return len(self._groups)

    def indices(self, epoch: int) -> Tensor:
        indices = self._shuffled.indices(epoch)
        group = self._groups[indices]
        # An image's rank in its group determines its micro-batch. Micro-batches are sorted by the
        # position of their last image, at which the reference's sampler would emit them.
        order = group.argsort(stable=True)
        counts = group.bincount()
        starts = counts.cumsum(0) - counts
        rank = torch.empty_like(group)
        rank[order] = torch.arange(len(group)) - starts[group[order]]
        is_complete = rank < counts[group] // self._size * self._size
        position = torch.arange(len(group))
        last = position.new_zeros(len(group))
        # Position in `order` of the micro-batch's last image
        end = starts[group] + rank // self._size * self._size + self._size - 1
        last[is_complete] = order[end[is_complete]]
        last[~is_complete] = len(group) + group[~is_complete]
        return indices[last.argsort(stable=True)]


def groups_of(ratios: Tensor, factor: int) -> Tensor:
    """Return int64[N], the group of each of float64[N] aspect ratios.

    `factor` 0 makes two groups, portrait and landscape.
    """
    bounds = (
        torch.linspace(-1.0, 1.0, 2 * factor + 1, dtype=torch.float64).exp2()
        if factor
        else torch.ones(1, dtype=torch.float64)
    )
    return torch.bucketize(ratios.double(), bounds, right=True)
