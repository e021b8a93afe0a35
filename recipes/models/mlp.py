"""Fully connected layers for columns of numbers, and layers that know the columns' scales."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from samewise.recipes.models.activations import activation_module


class Standardise(nn.Module):
    """Subtracts each column's mean, and divides by its standard deviation: float[..., K].

    Args:
        columns: K.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(columns))
        self.register_buffer("std", torch.ones(columns))

    def fit(self, values: Tensor) -> None:
        """Set mean and standard deviation to those of values, float[N, K].

        The deviation of a constant column counts as 1, as in scikit-learn's StandardScaler.
        """
        # Exact sums: the same on every machine
        for place, column in enumerate(values.double().t().tolist()):
            mean = math.fsum(column) / len(column)
            variance = math.fsum((value - mean) ** 2 for value in column) / len(column)
            self.mean[place], self.std[place] = mean, math.sqrt(variance) or 1.0

    def forward(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.std


@final
class Restore(Standardise):
    """Turns standardised outputs into numbers of the targets' scales, for recipe=regression."""

    def forward(self, values: Tensor) -> Tensor:
        return values * self.std + self.mean


@final
class MLP(nn.Module):
    """Fully connected layers: float32[..., inputs] to float32[..., outputs].

    Inputs are standardised and outputs restored by the training split's means and deviations, which
    recipe=regression sets.

    Args:
        inputs: Number of inputs, or their names.
        outputs: Number of outputs, or their names.
        widths: Outputs of each hidden layer; empty: a linear model.
        activation: The activation after each hidden layer, a function of torch.nn.functional.
        dropout: Share of the values dropped after each activation.
    """

    def __init__(
        self,
        *,
        inputs: int | Sequence[str],
        outputs: int | Sequence[str],
        widths: Sequence[int] = (64, 64),
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        first, last = (x if isinstance(x, int) else len(x) for x in (inputs, outputs))
        sizes = [first, *widths]
        self.scale = Standardise(first)
        self.hidden = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(*size), activation_module(activation), nn.Dropout(dropout))
                for size in pairwise(sizes)
            )
        )
        self.head = nn.Linear(sizes[-1], last)
        self.restore = Restore(last)

    def forward(self, features: Tensor) -> Tensor:
        return self.restore(self.head(self.hidden(self.scale(features))))


def restored(model: nn.Module, *, outputs: int | Sequence[str]) -> nn.Sequential:
    """Have a model of images learn standardised targets, for recipe=regression.

    Args:
        model: The model, float32[B, C, H, W] to float32[B, outputs].
        outputs: Number of targets, or their names.

    Returns:
        The model with a last layer that restores the targets' scales.
    """
    return nn.Sequential(model, Restore(outputs if isinstance(outputs, int) else len(outputs)))
