"""The batch that a recipe and a transform get, and the names of its labels."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Batch = dict[str, Any]
"""A micro-batch: names to tensors, or to lists of them, all with the same first dimension B."""


def batch_size(batch: Batch) -> int:
    """B: the length of the first tensor or list in the batch."""
    first = next(iter(batch.values()))
    # Torch.export leaves a shape free; len fixes it
    return first.shape[0] if isinstance(first, Tensor) else len(first)


def class_names(dataset: Any) -> list[str]:
    """Return `classes` of a data set, or of the one that it wraps; empty if there are none.

    `torch.utils.data.Subset` is one that wraps another.
    """
    return [str(name) for name in of_labels(dataset, "classes")]


def of_labels(dataset: Any, attribute: str) -> Sequence[Any]:
    """The same for any attribute that has an entry for each label."""
    while dataset is not None:
        if labels := getattr(dataset, attribute, None):
            return labels
        # `Subset` and other wrappers of torch hold the data set under this name
        dataset = getattr(dataset, "dataset", None)
    return ()
