"""A trained model and what it takes to apply it to a user's file, without the data that it was trained on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samewise.runner.data import streams
from samewise.runner.data.dataset import WithTransform
from samewise.runner.errors import ConfigError, Problem, SamewiseError, first_line, raised_at
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
            batch = self.batch_of([file])
            with self.precision.autocast():
                (prediction,) = self.recipe.predict(self.model, batch)
        return prediction

    def predict_files(self, files: Sequence[Path], output: Path | None) -> Iterator[tuple[Path, Prediction, list[Path]]]:
        """Each file's prediction as soon as it is made, and the pictures or sounds of it that were written.

        Args:
            files: The user's.
            output: A folder for pictures and sounds; None: none are written.

        Raises:
            ConfigError: at the end, with a problem for each file that cannot be read: the others may be sound.
        """
        problems: list[Problem] = []
        for file, name in zip(files, _names(files), strict=True):
            try:
                prediction = self.predict(file)
                yield file, prediction, _saved(prediction, file, output, name)
            except SamewiseError as error:
                problems += error.problems
        if problems:
            raise ConfigError(*problems)

    def batch_of(self, samples: Sequence[Any]) -> Batch:
        """Samples as the model takes them: transformed as in evaluation, one batch, on the device.

        Args:
            samples: Files, which the recipe reads, or samples as the data set gives them.

        Raises:
            DataError: a file cannot be read.
        """
        read = [self.recipe.read(Path(one)) if isinstance(one, str | Path) else one for one in samples]
        transformed = WithTransform.of(read, self.samples)
        return self.transform(self.to_device(self.recipe.collate([transformed[number] for number in range(len(read))])))


def _names(files: Sequence[Path]) -> list[str]:
    """What the results of each file begin with: its name without the ending, numbered where another has the same."""
    names = [file.stem for file in files]
    return [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names, start=1)]


def _saved(prediction: Prediction, file: Path, output: Path | None, name: str) -> list[Path]:
    if output is None:
        return []
    output.mkdir(parents=True, exist_ok=True)
    try:
        return prediction.save(output, name)
    except Exception as error:  # what the model makes of the file is told without its picture
        print(f"warning: {Problem(str(file), f'its picture could not be drawn: {first_line(error)}', hint=raised_at(error))}", file=sys.stderr)
        return []
