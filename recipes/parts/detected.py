"""The objects found in an image, to write and to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from torch import Tensor
from torchvision.transforms.v2 import functional

from samewise.recipes.parts import detection_pictures as pictures
from samewise.recipes.parts.average_precision import Image
from samewise.runner.interfaces import Prediction


@final
class Detected(Prediction):
    """The objects found in one image.

    Args:
        found: The boxes, in pixels of the file, even where the data set or the transforms of
            evaluation resize it.
        image: float32[3, H, W] in [0, 1]; it is resized to that image's size as it is drawn.
        classes: The names of the labels, the background's first; empty: their numbers.
        category_ids: The labels' numbers in COCO's results, -1 for a label that has none; empty:
            the labels themselves.
        least: The score of what is drawn; None: .3, or the three best.
    """

    def __init__(
        self,
        found: Image,
        image: Tensor,
        classes: Sequence[str] = (),
        category_ids: Sequence[int] = (),
        *,
        least: float | None = None,
    ) -> None:
        self.found = found
        self.classes, self._category_ids = list(classes), category_ids
        self._image = image
        self._least = least

    def values(self) -> dict[str, Any]:
        """`detections`, by descending score: `label`, `class` if it has a name, `score`, and `box`
        as [x1, y1, x2, y2].
        """
        found = self.found
        order = found.found_scores.argsort(descending=True, stable=True).tolist()
        return {
            "width": found.size[1],
            "height": found.size[0],
            "detections": [self._plain_values(place) for place in order],
        }

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `NAME_detections.png`: the image with boxes of at least the threshold.

        Without one, of at least .3, or the three best.
        """
        least, best = (0.3, 3) if self._least is None else (self._least, 0)
        same = tuple(self._image.shape[-2:]) == self.found.size
        image = (
            self._image
            if same
            else functional.resize(self._image, list(self.found.size), antialias=True)
        )
        return [
            pictures.save_prediction(
                folder / f"{name}_detections.png",
                image,
                self.found,
                self.classes,
                least=least,
                best=best,
            )
        ]

    def rows(self) -> list[dict[str, Any]]:
        """One row per box; for an image without detections, one row without columns."""
        detections: list[dict[str, Any]] = self.values()["detections"]
        boxes = [
            dict(zip(("x1", "y1", "x2", "y2"), one.pop("box"), strict=True)) for one in detections
        ]
        return [one | box for one, box in zip(detections, boxes, strict=True)] or [{}]

    def at_least(self, score: float) -> Detected:
        found, kept = self.found, self.found.found_scores >= score
        chosen = replace(
            found,
            found_boxes=found.found_boxes[kept],
            found_labels=found.found_labels[kept],
            found_scores=found.found_scores[kept],
        )
        return Detected(chosen, self._image, self.classes, self._category_ids, least=score)

    def coco(self, image: int | str) -> list[dict[str, Any]]:
        """In the form of https://cocodataset.org/#format-results: `bbox` is [x, y, width, height]
        in pixels, `category_id` from the data set's file.

        Boxes of a class that the file lacks are left out: it has no number for them.
        """
        made = list[dict[str, Any]]()
        for one in self.values()["detections"]:
            (x1, y1, x2, y2), label = one["box"], one["label"]
            number = self._category_ids[label] if label < len(self._category_ids) else label
            if number >= 0:
                made.append(
                    {
                        "image_id": image,
                        "category_id": number,
                        "bbox": [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)],
                        "score": one["score"],
                    }
                )
        return made

    def _plain_values(self, place: int) -> dict[str, Any]:
        label, box = int(self.found.found_labels[place]), self.found.found_boxes[place].tolist()
        named = {"class": self.classes[label]} if label < len(self.classes) else {}
        return {
            "label": label,
            **named,
            "score": float(self.found.found_scores[place]),
            "box": [round(edge, 2) for edge in box],
        }
