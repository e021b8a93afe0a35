"""Images in folders by class: `ROOT/SPLIT/CLASS/*.jpg`, as for torchvision's ImageFolder.

Or `ROOT/CLASS/*.jpg`, split by a hash of their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from samewise.datasets.parts.folders import IMAGES, find_classes, list_by_class
from samewise.datasets.parts.image_files import Cache, DecodedBy, ImageFiles, ImageMode
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.keyed_split import select_split
from samewise.runner.errors import DataError, Problem


@final
class ImageFolder(ImageFiles):
    """Samples `{"image": uint8[C, H, W], "label": int}`.

    Labels number the class folders in sorted order.

    Args:
        root: The folder with the splits' folders in it.
        folder: This split's folder in it; "" for the root itself.
        classes_from: The split's folder that names the classes (the training split's), so that one
            without some class does not number the others anew; None: this one.
        classes: The folders' names in the order of the labels, some of which may be missing; None:
            by `classes_from`.
        num_classes: How many classes there should be; None: as many as there are.
        split, shares, key: With shares, this one's part of all images of `folder`, by a hash of
            each one's CLASS/NAME (`parts.keyed_split`); None: all of them.
        mode, channels: As in `ImageFiles`.
        cache: "memory": decode all images once and keep them; they must be of one size. "none":
            decode each when it is asked for.
        decode: As in `ImageFiles`.
        transform: Applied to each image.

    Raises:
        DataError: a folder is missing or empty, or its classes are not those expected.
    """

    def __init__(
        self,
        *,
        root: str,
        folder: str,
        classes_from: str | None = None,
        classes: Sequence[str] | None = None,
        num_classes: int | None = None,
        split: str = "train",
        shares: Mapping[str, float] | None = None,
        key: str = "",
        mode: ImageMode = "rgb",
        channels: int | None = None,
        cache: Cache = "none",
        decode: DecodedBy = "worker",
        transform: Transform | None = None,
    ) -> None:
        base = Path(root).expanduser().absolute()
        here = base / folder
        known = find_classes(
            base,
            folder,
            classes_from=classes_from,
            classes=classes,
            num_classes=num_classes,
        )
        endings = (*IMAGES, ".npy") if mode == "channels" else IMAGES
        found, left_out = list_by_class(here, known, endings=endings)
        if not found:
            expected = "folders by class with JPEG, PNG, BMP, GIF, PPM, TIFF or WebP files"
            raise DataError(
                Problem(
                    str(here), "has no images", expected=expected, hint="set dataset.root=FOLDER"
                )
            )
        names = (
            list(found)
            if shares is None
            else select_split(list(found), split, shares, key=key, where=str(here))
        )
        labels = [found[name] for name in names]
        super().__init__(
            here,
            names,
            labels,
            classes=known,
            mode=mode,
            channels=channels,
            cache=cache,
            decode=decode,
            transform=transform,
            left_out=left_out,
        )
