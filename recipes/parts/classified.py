"""The predicted class of an image, to write and to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor

from samewise.recipes.parts import pictures
from samewise.runner.interfaces import Prediction


@final
class Classified(Prediction):
    """The predicted class of an image.

    Args:
        probabilities: float[K].
        classes: Their K names, or none.
        picture: Reads the image to draw it in, uint8[3, H, W]; None: there is none.
        least: Classes that are less probable are left out; None: none.
        separate: The image may have several classes: all that are not less probable than `least`
            are found.
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
        """The likeliest class, by number and, if known, name, and the probabilities of those found.

        None if all are below the threshold.
        """
        found = self._found()
        return {
            **self._named(found[0] if found else None),
            "probabilities": {
                self._name(label): float(self.probabilities[label]) for label in found
            },
        }

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `NAME_class.png`, the image with its class and probability; nothing for videos."""
        if self._picture is None:
            return []
        words = (
            ", ".join(f"{self._name(one)} {self.probabilities[one]:.2f}" for one in self._shown())
            or f"none of at least {self._least:g}"
        )
        return [pictures.save_classified(folder / f"{name}_class.png", self._picture(), words)]

    def rows(self) -> list[dict[str, Any]]:
        """One row, with the `probability` of the class.

        Of an image that may have several, one for each that reaches the threshold.
        """
        return [
            {
                **self._named(one),
                "probability": None if one is None else float(self.probabilities[one]),
            }
            for one in self._shown() or [None]
        ]

    def at_least(self, score: float) -> Classified:
        return Classified(
            self.probabilities, self.classes, self._picture, least=score, separate=self._separate
        )

    def _found(self) -> list[int]:
        """The five likeliest classes that reach the threshold, or all that do."""
        ranked = self.probabilities.argsort(descending=True, stable=True).tolist()
        return [
            one
            for one in (ranked if self._every else ranked[:5])
            if self.probabilities[one] >= self._least
        ]

    def _shown(self) -> list[int]:
        return self._found()[: None if self._every else 1]

    def _named(self, label: int | None) -> dict[str, Any]:
        return {
            "label": label,
            **({"class": None if label is None else self.classes[label]} if self.classes else {}),
        }

    def _name(self, label: int) -> str:
        """Distinct for each class: some data sets use a name twice."""
        if not self.classes:
            return str(label)
        name = self.classes[label]
        return name if self.classes.count(name) == 1 else f"{name} ({label})"
