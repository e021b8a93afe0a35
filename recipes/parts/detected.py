"""The objects detected in an image, to write and to draw."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final

from torch import Tensor
from torchvision.transforms.v2 import functional

from samewise.recipes.parts import detection_pictures as pictures
from samewise.recipes.parts.average_precision import Image
from samewise.runner.interfaces import Prediction


@final
class Detected(Prediction):
    """The objects detected in one image.

    Args:
        detections: The boxes, in pixels of the file, even if the data set or the transforms of
            evaluation resize it.
        image: float32[3, H, W] in [0, 1]; it is resized to the file's size when it is drawn.
        classes: The labels' names, the background first; empty: their numbers.
        category_ids: The labels' numbers in COCO's results, -1 for a label without one; empty: the
            labels themselves.
        least: Lower limit of the score of drawn boxes; None: .3, or the three best.
    """

    def __init__(
        self,
        detections: Image,
        image: Tensor,
        classes: Sequence[str] = (),
        category_ids: Sequence[int] = (),
        *,
        least: float | None = None,
    ) -> None:
        self.detections = detections
        self.classes, self._category_ids = list(classes), category_ids
        self._image = image
        self._least = least

    def values(self) -> dict[str, Any]:
        """Return `width`, `height` and `detections`, by descending score.

        A detection has `label`, `class` if it has a name, `score`, and `box` as [x1, y1, x2, y2];
        of a model with masks also `segmentation`, COCO's run lengths.
        """
        image = self.detections
        # Equal scores stay in the detector's order
        order = image.found_scores.argsort(descending=True, stable=True).tolist()
        return {
            "width": image.size[1],
            "height": image.size[0],
            "detections": [self._plain_values(place) for place in order],
        }

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `NAME_detections.png`: the image with the boxes that reach the limit.

        Without a limit, boxes with a score of at least .3, or the three best.
        """
        least, best = (0.3, 3) if self._least is None else (self._least, 0)
        is_same_size = tuple(self._image.shape[-2:]) == self.detections.size
        image = (
            self._image
            if is_same_size
            else functional.resize(self._image, list(self.detections.size), antialias=True)
        )
        return [
            pictures.save_prediction(
                folder / f"{name}_detections.png",
                image,
                self.detections,
                self.classes,
                least=least,
                best=best,
            )
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each box; for an image without detections, one row without columns."""
        detections: list[dict[str, Any]] = self.values()["detections"]
        for detection in detections:
            detection.pop("segmentation", None)
        boxes = [dict(zip(("x1", "y1", "x2", "y2"), x.pop("box"), strict=True)) for x in detections]
        return [x | box for x, box in zip(detections, boxes, strict=True)] or [{}]

    def at_least(self, score: float) -> Self:
        image, is_reached = self.detections, self.detections.found_scores >= score
        chosen = replace(
            image,
            found_boxes=image.found_boxes[is_reached],
            found_labels=image.found_labels[is_reached],
            found_scores=image.found_scores[is_reached],
            found_masks=image.found_masks
            and [x for x, y in zip(image.found_masks, is_reached, strict=True) if y],
        )
        return Detected(chosen, self._image, self.classes, self._category_ids, least=score)

    def coco(self, image: int | str) -> list[dict[str, Any]]:
        """Return the results in COCO's format, https://cocodataset.org/#format-results.

        `bbox` is [x, y, width, height] in pixels, `category_id` comes from the data set's file.
        Boxes of a class that the file lacks are left out: it has no number for them.
        """
        results = list[dict[str, Any]]()
        for detection in self.values()["detections"]:
            (x1, y1, x2, y2), label = detection["box"], detection["label"]
            number = self._category_ids[label] if label < len(self._category_ids) else label
            if number >= 0:
                results.append(
                    {
                        "image_id": image,
                        "category_id": number,
                        "bbox": [x1, y1, round(x2 - x1, 2), round(y2 - y1, 2)],
                        "score": detection["score"],
                        **{x: detection[x] for x in ("segmentation",) if x in detection},
                    }
                )
        return results

    def _plain_values(self, place: int) -> dict[str, Any]:
        label, box = (
            int(self.detections.found_labels[place]),
            self.detections.found_boxes[place].tolist(),
        )
        masks = self.detections.found_masks
        class_name = {"class": self.classes[label]} if label < len(self.classes) else {}
        return {
            "label": label,
            **class_name,
            "score": float(self.detections.found_scores[place]),
            "box": [round(edge, 2) for edge in box],
            **(
                {"segmentation": {"size": self.detections.size, "counts": masks[place].decode()}}
                if masks is not None
                else {}
            ),
        }
