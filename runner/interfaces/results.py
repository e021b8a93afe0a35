"""Results of an evaluation (metrics of a split) and of a prediction (of a file)."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.errors import ConfigError, Problem


class Scores(abc.ABC):
    """Accumulates results of `Recipe.measure`, batch by batch in order, and computes metrics."""

    @abc.abstractmethod
    def add(self, measured: Any) -> None:
        """Add the measurements of the next batch."""

    @abc.abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics by name, without the split's prefix: `{"loss": 0.1, "accuracy": 0.98}`."""

    sometimes: Sequence[str] = ()
    """Metrics that need something not every batch has, such as large objects: `compute` may leave
    them out."""

    def doubts(self) -> list[Problem]:
        """Return warnings about the metrics last computed. Default: none.

        A training prints each once.
        """
        return []

    def save_pictures(self, folder: Path) -> None:
        """Write what a person would look at or listen to (PNG, WAV, HTML, CSV files) into `folder`.

        Default: nothing.
        """


class MeanLosses(Scores):
    """The losses and their parts, each the mean over what all batches count.

    With several phases `PHASE/loss`, as in training.
    """

    def __init__(self) -> None:
        self._counts, self._sums = dict[str, float](), dict[str, dict[str, float]]()

    def add(self, measured: Mapping[str, tuple[float, Mapping[str, float]]]) -> None:
        """Add a batch's counts and sums, by phase."""
        for phase, (count, sums) in measured.items():
            # Divided once, at the end, since batches may count different numbers of items
            self._counts[phase] = self._counts.get(phase, 0.0) + count
            totals = self._sums.setdefault(phase, {})
            totals |= {name: totals.get(name, 0.0) + value for name, value in sums.items()}

    def compute(self) -> dict[str, float]:
        """The means by name."""
        several = len(self._sums) > 1
        # The mean over nothing is no number
        counts = {phase: count or math.nan for phase, count in self._counts.items()}
        return {
            f"{phase}/{name}" if several else name: value / counts[phase]
            for phase, sums in self._sums.items()
            for name, value in sums.items()
        }


class Prediction(abc.ABC):
    """A model's prediction for one file."""

    @abc.abstractmethod
    def values(self) -> dict[str, Any]:
        """Return the prediction in plain values (numbers, strings, lists and dicts of them).

        The terminal and programs read them.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.values()})"

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write pictures or sounds of the prediction into `folder`. Default: nothing.

        Each file's name begins with `name`.
        """
        return []

    def rows(self) -> list[dict[str, Any]]:
        """The outcome as rows of a table, by column: one for each thing found.

        Default: one row of the values that are neither lists nor dicts.
        """
        return [
            {
                key: value
                for key, value in self.values().items()
                if not isinstance(value, list | dict)
            }
        ]

    def at_least(self, score: float) -> Prediction:
        """Return the part with at least this score, to be drawn. Default: it has no scores."""
        raise ConfigError(
            Problem(
                "--threshold",
                f"what this model predicts ({type(self).__name__}) has no score",
                score,
            )
        )

    def coco(self, image: int | str) -> list[dict[str, Any]]:
        """Return COCO's results for an image of this number or name. Default: it has no boxes.

        Each box has `image_id`, `category_id`, `bbox` and `score`.
        """
        raise ConfigError(
            Problem(
                "--format",
                f"coco is for boxes, and what this model predicts ({type(self).__name__}) has none",
                expected="json or csv",
            )
        )
