"""ImageNet-1k (ILSVRC 2012), as unpacked from its archives.

1,281,167 training and 50,000 validation images of 1,000 classes. Source: Russakovsky et al. 2015,
ImageNet Large Scale Visual Recognition Challenge, arXiv 1409.0575.
"""

import re
from pathlib import Path
from typing import Literal, final

from samewise.datasets.parts.folders import IMAGES, class_folders, list_by_class, list_files
from samewise.datasets.parts.image_files import Cache, DecodedBy, ImageFiles
from samewise.datasets.parts.in_memory import Transform
from samewise.datasets.parts.lists import read_rows, read_text
from samewise.runner.errors import DataError, Problem

_LAYOUT = (
    "train/WNID/*.JPEG, and val/WNID/*.JPEG, or val/*.JPEG with the folder "
    "ILSVRC2012_devkit_t12 or the file LOC_val_solution.csv beside train and val"
)
_GET = (
    "download it from image-net.org (requires an account), unpack it, and set dataset.root=FOLDER"
)
_WNID = re.compile(r"n\d{8}")


@final
class ImageNet(ImageFiles):
    """Samples `{"image": uint8[3, H, W], "label": int}` of ImageNet-1k.

    Labels number the WordNet ids in sorted order, as torchvision's weights do.

    The true labels of a flat `val` folder come from the development kit (its ground truth by
    number, and `meta.mat` for the numbers) or from Kaggle's `LOC_val_solution.csv`.

    Args:
        root: The folder that holds `train` and `val`.
        split: "train" or "valid".
        num_classes: The number of classes in `train`: 1,000 unless it is a subset.
        cache: "none"; "memory" only if all images have the same size.
        decode: As in `ImageFiles`.
        transform: Applied to each image.

    Raises:
        DataError: A folder or file is missing, or has an unexpected content.
    """

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid"],
        num_classes: int = 1000,
        cache: Cache = "none",
        decode: DecodedBy = "worker",
        transform: Transform | None = None,
    ) -> None:
        base = Path(root).expanduser()
        for name in ("train", "val"):
            DataError.raise_if(
                not (base / name).is_dir(),
                str(base / name),
                "ImageNet was not found",
                expected=_LAYOUT,
                hint=_GET,
            )
        wnids = [name for name in class_folders(base / "train") if _WNID.fullmatch(name)]
        DataError.raise_if(
            len(wnids) != num_classes,
            str(base / "train"),
            f"has {len(wnids)} folders named by WordNet ids",
            expected=f"{num_classes}, {_LAYOUT}",
            hint=f"set dataset.num_classes={len(wnids)} to use this subset" if wnids else _GET,
        )
        split_folder = base / ("train" if split == "train" else "val")
        names, labels = _images(split_folder, wnids, base)
        super().__init__(
            split_folder,
            names,
            labels,
            classes=_class_names(wnids),
            cache=cache,
            decode=decode,
            transform=transform,
        )


def _images(split_folder: Path, wnids: list[str], base: Path) -> tuple[list[str], list[int]]:
    """Return a split's files, relative to its folder, and their labels."""
    label_of_file = list_by_class(split_folder, wnids).labels
    if label_of_file or split_folder.name == "train":
        return list(label_of_file), list(label_of_file.values())
    names = list_files(split_folder, IMAGES).names
    return names, _true_labels(names, wnids, base)


def _true_labels(names: list[str], wnids: list[str], base: Path) -> list[int]:
    """Return the labels of a flat validation folder.

    Raises:
        DataError: Neither source of the labels exists, or it does not match the images.
    """
    kit, solution = base / "ILSVRC2012_devkit_t12" / "data", base / "LOC_val_solution.csv"
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    if solution.is_file():
        # Kaggle's PredictionString holds an image's WordNet ids and boxes in turn
        truth = {
            row.text("ImageId", setting="root"): row.text(
                "PredictionString", setting="root"
            ).split()[0]
            for row in read_rows(
                solution, ("ImageId", "PredictionString"), item="image", setting="dataset.root"
            )
        }
        truth_wnids = [truth.get(Path(name).stem) for name in names]
        source = solution
    elif kit.is_dir():
        source = kit / "ILSVRC2012_validation_ground_truth.txt"
        truth_wnids = _read_development_kit(kit, len(names))
    else:
        raise DataError(
            Problem(
                str(base / "val"),
                "is a flat folder without labels for its images",
                expected=_LAYOUT,
                hint=_GET,
            )
        )
    unknown = [name for name, wnid in zip(names, truth_wnids, strict=True) if wnid not in label_of]
    DataError.raise_if(
        unknown,
        str(source),
        f"gives no known class for {len(unknown)} of {len(names)} images, the "
        f"first of them {next(iter(unknown), '')}",
    )
    return [label_of[wnid] for wnid in truth_wnids if wnid is not None]


def _read_development_kit(kit: Path, count: int) -> list[str]:
    """Return each validation image's WordNet id, in the order of their names."""
    # Importing scipy takes a while, and only this layout needs it
    from scipy.io import loadmat

    try:
        numbers = [
            int(line) for line in read_text(kit / "ILSVRC2012_validation_ground_truth.txt").split()
        ]
        synsets = loadmat(kit / "meta.mat", squeeze_me=True)["synsets"]
        wnid_of = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
        wnids = [wnid_of[number] for number in numbers]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            Problem(
                str(kit),
                f"the development kit cannot be read: {error}",
                expected="ILSVRC2012_validation_ground_truth.txt and meta.mat",
            )
        ) from None
    DataError.raise_if(
        len(wnids) != count,
        str(kit),
        f"lists {len(wnids)} validation images",
        expected=f"{count}, as val has",
        hint="unpack ILSVRC2012_img_val.tar again",
    )
    return wnids


def _class_names(wnids: list[str]) -> list[str]:
    """Return the usual names if the classes are ImageNet's thousand; otherwise the ids."""
    if len(wnids) != 1000:
        return wnids
    # torchvision lists the names in the order of the sorted ids
    from torchvision.models import ResNet18_Weights

    return list(ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
