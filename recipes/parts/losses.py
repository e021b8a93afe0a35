"""Classification losses with one value per sample: float[B].

They take logits float[B, K] and labels, int64[B] or float[B, K].

A step's loss is the mean of these values over its samples, however its batch is cut. A class's
weight therefore multiplies the loss of that class's samples; torch's `reduction="mean"` divides by
the weights of the samples in the batch, so that its gradient depends on how the batch is cut.

A loss's `link` says how its logits become probabilities: `softmax` over the classes, the default,
or `sigmoid` for each class separately.
"""

from collections.abc import Sequence
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import sigmoid_focal_loss

from samewise.recipes.parts.forms import form_of
from samewise.runner.errors import ConfigError, Problem


@final
class CrossEntropy(nn.Module):
    """Cross-entropy, as `torch.nn.functional.cross_entropy`.

    Args:
        weight: K numbers, each multiplying the loss of one class's samples; None: all 1.

    Raises:
        ConfigError: A weight is not valid, or there is not one for each class.
    """

    def __init__(self, *, weight: Sequence[float] | None = None) -> None:
        super().__init__()
        _require_weights("weight", weight)
        self.weight = None if weight is None else tuple(weight)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, label, weight=_classes("weight", self.weight, logits), reduction="none"
        )


@final
class Focal(nn.Module):
    """Focal loss, as `torchvision.ops.sigmoid_focal_loss`, summed over the classes.

    Each class is a separate binary decision. Source: Lin et al. 2017, Focal Loss for Dense Object
    Detection, arXiv 1708.02002.

    Args:
        alpha: Weight of a class that is present; an absent one has 1 - alpha. -1: both have 1.
        gamma: Exponent that reduces the loss of well-classified samples; 0: binary cross-entropy.

    Raises:
        ConfigError: `alpha` or `gamma` is not valid.
    """

    link: Final = "sigmoid"

    def __init__(self, *, alpha: float = 0.25, gamma: float = 2.0) -> None:
        super().__init__()
        ConfigError.raise_if(
            not (0.0 <= alpha <= 1.0 or alpha == -1.0),
            "alpha",
            "is not a valid weight",
            alpha,
            "a number from 0 to 1, or -1 for none",
        )
        ConfigError.raise_if(not gamma >= 0.0, "gamma", "is negative", gamma, "0 or more")
        self.alpha, self.gamma = alpha, gamma

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        return sigmoid_focal_loss(
            logits, shares(label, logits), alpha=self.alpha, gamma=self.gamma
        ).sum(1)


@final
class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy summed over the classes: images may have several labels or none.

    As `torch.nn.functional.binary_cross_entropy_with_logits`; each class is a binary decision.

    Args:
        positive_weight: K numbers, each multiplying the loss where its class is present; None: all
            1.

    Raises:
        ConfigError: A weight is not valid, or there is not one for each class.
    """

    link: Final = "sigmoid"

    def __init__(self, *, positive_weight: Sequence[float] | None = None) -> None:
        super().__init__()
        _require_weights("positive_weight", positive_weight)
        self.positive_weight = None if positive_weight is None else tuple(positive_weight)

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        weight = _classes("positive_weight", self.positive_weight, logits)
        return F.binary_cross_entropy_with_logits(
            logits, shares(label, logits), pos_weight=weight, reduction="none"
        ).sum(1)


@final
class MeanSquared(nn.Module):
    """Mean squared error over the K outputs, with class labels as one-hot.

    As `torch.nn.functional.mse_loss`.
    """

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        return F.mse_loss(logits, shares(label, logits), reduction="none").mean(1)


@final
class MeanAbsolute(nn.Module):
    """Mean absolute error over the K outputs, with class labels as one-hot.

    As `torch.nn.functional.l1_loss`.
    """

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        return F.l1_loss(logits, shares(label, logits), reduction="none").mean(1)


@final
class Huber(nn.Module):
    """Huber loss, the mean over the K outputs, with class labels as one-hot.

    As `torch.nn.functional.huber_loss`: quadratic for errors below `delta`, linear above. Source:
    Huber 1964, https://doi.org/10.1214/aoms/1177703732.

    Args:
        delta: The error from which the loss is linear.

    Raises:
        ConfigError: `delta` is not positive.
    """

    def __init__(self, *, delta: float = 1.0) -> None:
        super().__init__()
        ConfigError.raise_if(
            not delta > 0.0, "delta", "is not a valid error", delta, "a number above 0"
        )
        self.delta = delta

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        target = shares(label, logits)
        return F.huber_loss(logits, target, reduction="none", delta=self.delta).mean(1)


@final
class SignalToNoise(nn.Module):
    """Minus the signal-to-noise ratio in dB of signals float[B, K], for recipe=separation.

    10 log10 of the energy of the true signal over that of the error, after which the loudness of an
    estimate counts. As torchmetrics' `signal_noise_ratio`, with 1e-8 added to both energies.
    """

    def forward(self, estimates: Tensor, signals: Tensor) -> Tensor:
        errors = (signals - estimates).square().sum(1)
        return 10.0 * torch.log10((errors + 1e-8) / (signals.square().sum(1) + 1e-8))


def of_samples(criterion: nn.Module, output: Tensor, label: Tensor) -> Tensor:
    """Return each sample's loss, float32[B], with its shape checked.

    Raises:
        ConfigError: The loss does not give one number for each sample.
    """
    # Losses are float32 for any precision of the model
    with torch.autocast(output.device.type, enabled=False):
        losses = criterion(output, label)
    if not isinstance(losses, Tensor) or losses.shape != output.shape[:1]:
        of_outputs = isinstance(losses, Tensor) and losses.shape == output.shape
        fitting = (
            "the sum or mean over the outputs, as loss=bce or mse gives"
            if of_outputs
            else "torch's own losses need reduction: none"
        )
        raise ConfigError(
            Problem(
                "recipe.loss",
                "does not give one loss for each sample",
                form_of(losses),
                f"a tensor [{len(output)}]",
                f"{fitting}; `samewise list loss` shows those that fit",
            )
        )
    return losses


def is_sigmoid(loss: nn.Module | None) -> bool:
    """Whether the loss treats each class as a separate decision, by its `link`.

    Raises:
        ConfigError: The link is unknown.
    """
    # Of torch's losses with one value per sample, only this one has separate decisions
    link = getattr(
        loss, "link", "sigmoid" if isinstance(loss, nn.MultiLabelSoftMarginLoss) else "softmax"
    )
    ConfigError.raise_if(
        link not in ("softmax", "sigmoid"),
        "recipe.loss.link",
        "is not a way from logits to probabilities",
        link,
        "softmax or sigmoid",
    )
    return link == "sigmoid"


def shares(label: Tensor, logits: Tensor) -> Tensor:
    """Return labels as float[B, K], class labels as one-hot, without waiting for the device."""
    if label.dim() == 2:
        return label.to(logits.dtype)
    return (label[:, None] == torch.arange(logits.shape[1], device=logits.device)).to(logits.dtype)


def _classes(name: str, weights: tuple[float, ...] | None, logits: Tensor) -> Tensor | None:
    """Return float[K] in the logits' dtype and on their device, without waiting for it."""
    if weights is None:
        return None
    if len(weights) != logits.shape[1]:
        raise ConfigError(
            Problem(
                f"recipe.loss.{name}",
                "does not have one number for each class",
                len(weights),
                f"{logits.shape[1]} numbers",
            )
        )
    tensor = torch.tensor(weights, dtype=logits.dtype)
    return (
        # Only a copy from page-locked memory does not wait
        tensor.pin_memory().to(logits.device, non_blocking=True)
        if logits.device.type == "cuda"
        else tensor.to(logits.device)
    )


def _require_weights(name: str, weights: Sequence[float] | None) -> None:
    wrong = [] if weights is None else [x for x in weights if not 0.0 <= x < float("inf")]
    ConfigError.raise_if(
        wrong,
        name,
        "has a number that is not a valid weight",
        wrong[:1],
        "numbers of at least 0, one for each class",
    )
