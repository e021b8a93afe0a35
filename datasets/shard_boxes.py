"""Images with boxes in shards."""

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from samewise.datasets.coco import add_objects
from samewise.datasets.parts.annotated_images import Annotated, AnnotatedImages, Cache
from samewise.datasets.parts.classes import number_classes, object_names, require_count
from samewise.datasets.parts.folders import IMAGES
from samewise.datasets.parts.shard_samples import ShardSamples
from samewise.runner.shards.index import plan_of


@final
class ShardBoxes(ShardSamples, AnnotatedImages):
    """Samples of `AnnotatedImages` in shards; an image's number is its place in its split's shards.

    The index has all objects, and the images' sizes. As of COCO's files, boxes are cut at the
    image's border, and boxes that then have no area are left out; in training so are crowds, and
    images without a box.

    Args:
        image: The column of the images, or a member's ending, as `content` in `ShardSamples`.
        objects: The column, the ending of a member, or the field of the JSON in `.json` with a list
            of objects, or an object with a list for each field. An object has `bbox`, [x, y,
            width, height] in pixels, and `category`, a name or a number, and may have `area` and `iscrowd`.
        classes: Category names in the order of their labels from 1, or from 0 with `background`
            first; categories that are numbers count them from 0, without the background. None: those
            of the data that were converted, else all categories that occur, sorted.
        num_classes: The expected number of labels, with the background; None allows any number.
        training: Leave out crowds, and images without a box.
        size, cache: As in `AnnotatedImages`.
        root, split, shares, key, window: As in `ShardSamples`.

    Raises:
        DataError: As in `ShardSamples`; or an annotation is impossible, or a class is unknown.
        ConfigError: As in `ShardSamples`.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        image: str = "image",
        objects: str = "objects",
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        training: bool = False,
        size: Sequence[int] | None = None,
        cache: Cache = "none",
        shares: Mapping[str, float] | None = None,
        key: str = "",
        window: int = 16,
    ) -> None:
        ShardSamples.__init__(
            self,
            root,
            split,
            content=("image", image),
            endings=IMAGES,
            label=objects,
            has_objects=True,
            shares=shares,
            key=key,
            window=window,
        )
        classes = plan_of(root).get("classes") or None if classes is None else classes
        described = {text: json.loads(text) for text in self.all_labels}
        categories = {x["category"] for *_, listed in described.values() for x in listed}
        names, numbers = number_classes(
            root, categories, None if classes is None else object_names(classes)
        )
        require_count(root, names, num_classes, labels=len(names) + 1)
        labels, images = {number: number + 1 for number in numbers.values()}, list[Annotated]()
        self._orientations = list[int]()
        for index in range(len(self)):
            height, width, turned, listed = described[self.own_labels[self.label_number(index)]]
            row = self.row(index)
            annotated = Annotated(
                f"{os.path.basename(self.path(index))}, sample {row}", width, height, row
            )
            entries = [
                {**x, "image_id": row, "category_id": numbers[x["category"]]} for x in listed
            ]
            add_objects(entries, {row: annotated}, labels, f"{root}/{annotated.name}", masks=False)
            if not training or not all(annotated.crowd):
                images.append(annotated)
                self._orientations.append(turned)
        self.rows = np.array([x.number for x in images], dtype=np.int64)
        AnnotatedImages.__init__(
            self,
            Path(root),
            images,
            classes=["background", *names],
            training=training,
            size=size,
            cache=cache,
        )

    def fields(self, index: int) -> tuple[str, dict[str, Any]]:
        return self.content(index)[2], super().fields(index)[1]

    def file(self, index: int) -> bytes:
        return self.content(index)[0]

    def orientation(self, index: int) -> int:
        return self._orientations[index]

    def require_files(self, folder: Path, names: Sequence[str]) -> None:
        """Require nothing: the index has been compared with the shards."""

    def add_contents(self, digest: blake2b) -> None:
        digest.update(self.hash_shards().encode())
