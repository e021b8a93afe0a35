"""The predicted class of an image or a text, to write and to draw; the classes of a table's rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from torch import Tensor

from samewise.recipes.parts import pictures
from samewise.runner.interfaces import Prediction


@final
class Classified(Prediction):
    """The predicted class of an image.

    Args:
        probabilities: float[K].
        classes: The names of the K classes, or none.
        picture: Reads the image to draw the class into, uint8[3, H, W]; None: there is none.
        least: Lower limit of the probability of reported classes; None: no limit.
        separate: Whether the image may have several classes: all that reach `least` are reported.
    """

    def __init__(
        self,
        probabilities: Tensor,
        classes: Sequence[str] = (),
        picture: Callable[[], Tensor] | None = None,
        *,
        least: float | None = None,
        separate: bool = False,
    ) -> None:
        self.probabilities = probabilities
        self.classes = list(classes) if len(classes) == len(probabilities) else []
        self._picture = picture
        self._least = least or 0.0
        self._separate = separate
        self._every = separate and least is not None

    def values(self) -> dict[str, Any]:
        """Return the likeliest class, by number and name, and the reported probabilities.

        The class is None if all are below the limit.
        """
        labels = self._found()
        return {
            **self._named(labels[0] if labels else None),
            "probabilities": {
                self._name(label): float(self.probabilities[label]) for label in labels
            },
        }

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `NAME_class.png`, the image with its class and probability; nothing for videos."""
        if self._picture is None:
            return []
        caption = (
            ", ".join(
                f"{self._name(label)} {self.probabilities[label]:.2f}" for label in self._shown()
            )
            or f"none of at least {self._least:g}"
        )
        return [pictures.save_classified(folder / f"{name}_class.png", self._picture(), caption)]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row, with the `probability` of the class.

        An image that may have several classes has a row for each that reaches the limit.
        """
        return [
            {
                **self._named(label),
                "probability": None if label is None else float(self.probabilities[label]),
            }
            for label in self._shown() or [None]
        ]

    def at_least(self, score: float) -> Self:
        return Classified(
            self.probabilities, self.classes, self._picture, least=score, separate=self._separate
        )

    def _found(self) -> list[int]:
        """Return the five likeliest classes that reach the limit, or all that do."""
        ranked = self.probabilities.argsort(descending=True, stable=True).tolist()
        return [
            label
            for label in (ranked if self._every else ranked[:5])
            if self.probabilities[label] >= self._least
        ]

    def _shown(self) -> list[int]:
        return self._found()[: None if self._every else 1]

    def _named(self, label: int | None) -> dict[str, Any]:
        return {
            "label": label,
            **({"class": None if label is None else self.classes[label]} if self.classes else {}),
        }

    def _name(self, label: int) -> str:
        """Return the class's name, unique for each class."""
        if not self.classes:
            return str(label)
        # Some data sets use a name twice
        name = self.classes[label]
        return name if self.classes.count(name) == 1 else f"{name} ({label})"


@final
@dataclass(frozen=True)
class ClassifiedRows(Prediction):
    """The predicted classes of a table's rows.

    Args:
        predictions: Each row's prediction.
    """

    predictions: Sequence[Prediction]

    def values(self) -> dict[str, Any]:
        return {"rows": self.rows()}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each class of each row of the table, numbered from 1."""
        return [
            {"row": number, **row}
            for number, each in enumerate(self.predictions, start=1)
            for row in each.rows()
        ]

    def at_least(self, score: float) -> Self:
        return ClassifiedRows([each.at_least(score) for each in self.predictions])
