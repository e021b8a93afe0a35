"""Labels of classes: from samples to tensors, checked, and compared with a model's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samewise.runner.errors import DataError, Problem

_ROUNDING = 0.05
"""What the sum of an image's shares of classes may be off by."""


def labels_of(labels: Sequence[Any], num_classes: int | None) -> Tensor:
    """int64[B] or float32[B, K] of the samples' labels.

    Raises:
        DataError: one is out of range, or is no label.
    """
    try:
        kinds = set(map(type, labels))  # one is the usual case, and the fast one
        made = (
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
    if made.dim() == 1 and not made.is_floating_point():
        made = made.long()
        if num_classes is not None:
            check_range(made, num_classes, f"there are {num_classes} classes")
    elif made.dim() != 2 or not made.is_floating_point():
        raise DataError(
            Problem(
                "dataset",
                "labels are not valid classes",
                labels[0],
                "an integer, or one float for each class",
            )
        )
    return made


def require_shares(labels: Tensor) -> None:
    """Raise a DataError if a cross-entropy is given rows that do not add up to 1: it would
    count an image as often as it has labels.
    """
    sums = labels.double().sum(1)
    if len(wrong := (~((sums - 1.0).abs() <= _ROUNDING)).nonzero()):
        words = (
            f"a label's numbers add up to {float(sums[wrong[0]]):g}, and a cross-entropy "
            "takes shares that add up to 1"
        )
        hint = "loss=bce takes any number of labels for each image, as zeros and ones"
        raise DataError(
            Problem(
                "dataset",
                words,
                labels[wrong[0, 0]].tolist(),
                "one class, or its share for each class",
                hint,
            )
        )


def check_range(labels: Tensor, classes: int, reason: str) -> None:
    """One pass over B integers; a wrong one is located only if there is one."""
    low, high = (int(end) for end in torch.aminmax(labels))
    if low < 0 or high >= classes:
        reason, value, expected = (
            f"the label is out of range: {reason}",
            int(labels[(labels < 0) | (labels >= classes)][0]),
            f"0 to {classes - 1}",
        )
        hint = "set dataset.num_classes to the number of classes, counted from 0"
        raise DataError(Problem("dataset", reason, value, expected, hint))


def hits(logits: Tensor, label: Tensor) -> Tensor:
    """int64[]: for how many images the largest logit belongs to the label, or to the likeliest
    label.
    """
    prediction = logits.argmax(1)
    return (prediction == (label if label.dim() == 1 else likeliest_label(label, prediction))).sum()


def likeliest_label(labels: Tensor, prediction: Tensor) -> Tensor:
    """int64[B]: the largest of labels float[B, K].

    Of several, the predicted one, since the image shows it.
    """
    best, first = labels.max(1)
    return torch.where(
        (labels.gather(1, prediction[:, None])[:, 0] == best) & (best > 0), prediction, first
    )


def rank(logits: Tensor, label: Tensor) -> Tensor:
    """int64[B]: the number of classes ranked before the true one, by larger logit, then by lower
    number.

    Unlike `topk`, whose choice among equal logits is not specified, this is one answer on every
    device; it is 0 exactly where `argmax` is right. A logit that is not a number counts as larger,
    so a model that gives nothing else is never right.
    """
    true = logits.gather(1, label[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < label[:, None]
    return (~(logits <= true) | ((logits == true) & earlier)).sum(1)


def worth_seeing(loss: Tensor, *, worst: int = 4, first: int = 4) -> Tensor:
    """int64[S]: the batch's positions with the largest loss, and its first few."""
    chosen = torch.zeros_like(loss, dtype=torch.bool)
    chosen[loss.argsort(descending=True, stable=True)[:worst]] = True
    chosen[:first] = True
    return chosen.nonzero().flatten()
