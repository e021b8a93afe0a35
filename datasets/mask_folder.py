"""Images and maps of classes, one for each image: folders of your own, or Pascal VOC's layout."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, final

from torchvision import tv_tensors

from samewise.datasets.parts.contents import add_files
from samewise.datasets.parts.folders import IMAGES, list_files
from samewise.datasets.parts.image_files import ImageFiles
from samewise.datasets.parts.keyed_split import select_split
from samewise.datasets.parts.lists import read_lines
from samewise.datasets.parts.masks import read_class_map
from samewise.datasets.parts.names import require_listed
from samewise.runner.errors import DataError, Problem


@final
class MaskFolder(ImageFiles):
    """Samples `{"image": tv_tensors.Image uint8[3, H, W], "mask": tv_tensors.Mask uint8[H, W]}`.

    A mask is an image file of 8 bits, grey or with a palette, whose pixels are labels; 255 marks
    pixels that do not count. It has its image's name with the ending .png.

    Args:
        root: The folder that the others are relative to.
        images_dir: The folder of images.
        masks_dir: The folder of masks.
        listed: A file with the names of this split's images, without endings, relative to `root`;
            None: `split` and `shares` decide.
        split: "train", "valid" or "test".
        shares: Shares of `valid` and `test`, parts of 1: a hash of its file's name decides each
            image's split (`parts.keyed_split`).
        key: The hash's key: another key splits differently.
        classes: The labels' names; None: their numbers.
        num_classes: The number of labels, for the names.

    Raises:
        DataError: A folder, list or file is missing, a mask differs from its image in size, or the
            names are not `num_classes`.
    """

    # A label for each pixel is in a second file
    fields = None  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        *,
        root: str,
        images_dir: str = "images",
        masks_dir: str = "masks",
        listed: str | None = None,
        split: Literal["train", "valid", "test"] = "train",
        shares: Mapping[str, float] | None = None,
        key: str = "",
        classes: Sequence[str] | None = None,
        num_classes: int,
    ) -> None:
        images, masks = (Path(root).expanduser() / x for x in (images_dir, masks_dir))
        names = list_files(images, IMAGES).names
        if listed is None:
            names = select_split(names, split, shares or {}, key=key, where=str(images))
        else:
            by_stem = {str(Path(name).with_suffix("")): name for name in names}
            stems = map(str.strip, read_lines(Path(root).expanduser() / listed))
            names = [by_stem.get(stem, f"{stem}.jpg") for stem in stems]
            require_listed(images, names, listed_in=listed)
        DataError.raise_if(
            not masks.is_dir(),
            str(masks),
            "there is no such folder",
            hint="set dataset.masks_dir to the folder of masks in dataset.root",
        )
        self._masks = [masks / Path(name).with_suffix(".png") for name in names]
        require_listed(
            masks, [str(x.relative_to(masks)) for x in self._masks], listed_in=f"{images} by name"
        )
        super().__init__(images, names, [0] * len(names), classes=classes or range(num_classes))
        self.classes, self.unused_classes = [*map(str, self.classes)], []
        DataError.raise_if(
            len(self.classes) != num_classes,
            "dataset.num_classes",
            "is wrong",
            num_classes,
            hint=f"set dataset.num_classes={len(self.classes)}, the number of dataset.classes",
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, mask = self._read(index), read_class_map(self._masks[index])
        if image.shape[1:] != mask.shape:
            height, width = mask.shape
            raise DataError(
                Problem(
                    str(self._masks[index]),
                    f"has {width} x {height} pixels, but its image "
                    f"{image.shape[2]} x {image.shape[1]}",
                )
            )
        return {"image": tv_tensors.Image(image), "mask": tv_tensors.Mask(mask)}

    def fingerprint(self) -> str:
        """Return 32 hex digits that cover classes, names, and sizes and bytes of some files."""
        digest = blake2b(super().fingerprint().encode(), digest_size=16)
        add_files(digest, self._masks.__getitem__, len(self))
        return digest.hexdigest()
