"""Images in folders by class: `ROOT/SPLIT/CLASS/*.jpg`, as for torchvision's ImageFolder.

Also `ROOT/CLASS/*.jpg`, split by a hash of the files' names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from samewise.datasets.parts.folders import IMAGES, TENSORS, find_classes, list_by_class
from samewise.datasets.parts.image_files import Cache, DecodedBy, ImageFiles, ImageMode
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.keyed_split import select_split
from samewise.runner.errors import DataError


@final
class ImageFolder(ImageFiles):
    """Samples `{"image": uint8[C, H, W], "label": int}` from folders by class.

    Labels number the class folders in sorted order.

    Args:
        root: The folder of the splits' folders.
        folder: This split's folder in it; "" for the root itself.
        classes_from: The folder that names the classes, usually the training split's: a split that
            lacks a class then keeps the same labels. None: this split's folder.
        classes: The class folders' names in the order of the labels; some may be missing. None: by
            `classes_from`.
        num_classes: The expected number of classes; None allows any number.
        split: "train", "valid" or "test": the part of `folder` that `shares` selects.
        shares: Shares of `valid` and `test`, parts of 1: a hash of CLASS/NAME decides each image's
            split (`parts.keyed_split`). None: this split has all images of `folder`.
        key: The hash's key: another key splits differently.
        mode, channels: As in `ImageFiles`.
        cache: "memory" decodes all images once and keeps them; they must have the same size. "none"
            decodes each when it is requested.
        decode: As in `ImageFiles`.
        transform: Applied to each image.

    Raises:
        DataError: A folder is missing or empty, or its classes are not the expected ones.
        ConfigError: As in `ImageFiles`.
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
        base = Path(root).expanduser()
        split_folder = base / folder
        class_list = find_classes(
            base,
            folder,
            classes_from=classes_from,
            classes=classes,
            num_classes=num_classes,
        )
        endings = {"channels": (*IMAGES, ".npy"), "tensors": TENSORS}.get(mode, IMAGES)
        label_of_file, left_out = list_by_class(split_folder, class_list, endings=endings)
        DataError.raise_if(
            not label_of_file,
            str(split_folder),
            "has no images",
            expected=f"folders by class with files {', '.join(endings)}",
            hint=f"dataset=shards dataset.root={root} reads them as they are"
            if ".tar file" in left_out
            else "",
        )
        names = (
            list(label_of_file)
            if shares is None
            else select_split(list(label_of_file), split, shares, key=key, where=str(split_folder))
        )
        labels = [label_of_file[name] for name in names]
        super().__init__(
            split_folder,
            names,
            labels,
            classes=class_list,
            mode=mode,
            channels=channels,
            cache=cache,
            decode=decode,
            transform=transform,
            left_out=left_out,
        )
