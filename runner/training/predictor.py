"""A trained model and what it takes to apply it to a user's file, without the data that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samewise.runner.data import streams
from samewise.runner.data.dataset import WithTransform
from samewise.runner.interfaces import Batch, Prediction, Recipe
from samewise.runner.precision import Precision


@dataclass(frozen=True)
class Predictor:
    """Built by `build_predictor`.

    Args:
        recipe: Reads files, collates them and says what is predicted.
        model: With its trained weights, in eval mode.
        precision: The run's.
        samples: The sample transforms of evaluation.
        transform: The batch transforms of evaluation.
        to_device: Takes a batch there.
        seed: The run's.
    """

    recipe: Recipe
    model: nn.Module
    precision: Precision
    samples: Sequence[Callable[[Any], Any]]
    transform: Callable[[Batch], Batch]
    to_device: Callable[[Batch], Batch]
    seed: int

    def predict(self, file: Path) -> Prediction:
        """What the model makes of a file: the same each time, and whatever other files are asked for.

        Raises:
            DataError: it cannot be read, or is not what the recipe predicts from.
        """
        with streams.scope(self.seed, "predict"), torch.no_grad():
            sample = WithTransform.of([self.recipe.read(file)], self.samples)[0]
            batch = self.transform(self.to_device(self.recipe.collate([sample])))
            with self.precision.autocast():
                (prediction,) = self.recipe.predict(self.model, batch)
        return prediction
