"""Labels of classes: from samples to tensors, checked, and compared with a model's outputs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import DataError, Problem

_ROUNDING = 0.05
"""Tolerance of the sum of an image's shares of classes."""


def labels_of(labels: Sequence[Any], num_classes: int | None) -> Tensor:
    """Return the samples' labels as int64[B] or float32[B, K].

    Raises:
        DataError: A label is invalid or out of range.
    """
    try:
        # A single type is the usual case, and fast
        kinds = set(map(type, labels))
        tensor = (
            torch.tensor(labels)
            if kinds == {int}
            else torch.stack(
                list(labels) if kinds == {Tensor} else list(map(torch.as_tensor, labels))
            )
        )
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            Problem(
                "dataset",
                "labels are not numbers of one type",
                labels[0],
                "an integer, or one float for each class",
            )
        ) from None
    if tensor.dim() == 1 and not tensor.is_floating_point():
        tensor = tensor.long()
        if num_classes is not None:
            check_range(tensor, num_classes, f"there are {num_classes} classes")
    elif tensor.dim() != 2 or not tensor.is_floating_point():
        raise DataError(
            Problem(
                "dataset",
                "labels are not valid classes",
                labels[0],
                "an integer, or one float for each class",
            )
        )
    return tensor


def require_shares(labels: Tensor) -> None:
    """Raise a DataError if rows of labels do not add up to 1, as a cross-entropy needs."""
    # Otherwise a cross-entropy would count an image as often as it has labels
    sums = labels.double().sum(1)
    if len(wrong := (~((sums - 1.0).abs() <= _ROUNDING)).nonzero()):
        raise DataError(
            Problem(
                "dataset",
                f"a label's numbers add up to {float(sums[wrong[0]]):g}, and a cross-entropy "
                "takes shares that add up to 1",
                labels[wrong[0, 0]].tolist(),
                "one class, or its share for each class",
                "loss=bce takes any number of labels for each image, as zeros and ones",
            )
        )


def check_range(labels: Tensor, classes: int, reason: str) -> None:
    """Raise a DataError if a label is out of range."""
    # One pass over the labels; a wrong one is located only if there is one
    low, high = map(int, torch.aminmax(labels))
    if low < 0 or high >= classes:
        raise DataError(
            Problem(
                "dataset",
                f"the label is out of range: {reason}",
                int(labels[(labels < 0) | (labels >= classes)][0]),
                f"0 to {classes - 1}",
                "set dataset.num_classes to the number of classes, counted from 0",
            )
        )


def hits(logits: Tensor, label: Tensor) -> Tensor:
    """Return int64[]: the number of images whose largest logit belongs to the (likeliest) label."""
    prediction = logits.argmax(1)
    return (prediction == (label if label.dim() == 1 else likeliest_label(label, prediction))).sum()


def likeliest_label(labels: Tensor, prediction: Tensor) -> Tensor:
    """Return int64[B]: the largest of labels float[B, K]; of several, the predicted one."""
    best, largest = labels.max(1)
    return torch.where(
        (labels.gather(1, prediction[:, None])[:, 0] == best) & (best > 0), prediction, largest
    )


def rank(logits: Tensor, label: Tensor) -> Tensor:
    """Return int64[B]: the number of classes ranked before the true one.

    Classes are ranked by larger logit, then by lower number. Unlike `topk`, whose choice among
    equal logits is not specified, the rank is the same on every device, and 0 exactly where
    `argmax` is right. NaN counts as larger, so a model that returns only NaN is never right.
    """
    true = logits.gather(1, label[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < label[:, None]
    return (~(logits <= true) | ((logits == true) & earlier)).sum(1)


def worth_seeing(loss: Tensor, *, worst: int = 4, first: int = 4) -> Tensor:
    """Return int64[S]: the batch's positions with the largest loss, and its first few."""
    chosen = torch.zeros_like(loss, dtype=torch.bool)
    chosen[loss.argsort(descending=True, stable=True)[:worst]] = True
    chosen[:first] = True
    return chosen.nonzero().flatten()
