"""ImageNet's layouts, with three classes of two images."""

from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from samewise.datasets.imagenet import ImageNet

WNIDS = ("n01440764", "n02105855", "n15075141")


def write(path: Path, grey: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (grey, grey, grey)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Training images only; the grey value of each is 80 times its label."""
    for label, wnid in enumerate(WNIDS):
        for number in range(2):
            write(tmp_path / "train" / wnid / f"{wnid}_{number}.JPEG", 80 * label)
    return tmp_path


def flat_val(root: Path) -> list[int]:
    """Write six validation images without class folders; return their labels."""
    labels = [2, 0, 1, 1, 0, 2]
    for number, label in enumerate(labels, 1):
        write(root / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", 80 * label)
    return labels


def labels_and_greys(dataset: ImageNet) -> list[tuple[int, int]]:
    """Each sample's label, and the label that its grey value encodes."""
    return [(dataset[index]["label"], round(dataset[index]["image"].float().mean().item() / 80)) for index in range(len(dataset))]


def test_class_folders_give_the_labels_in_both_splits(root: Path):
    for label, wnid in enumerate(WNIDS):
        write(root / "val" / wnid / f"ILSVRC2012_val_{label:08d}.JPEG", 80 * label)
    assert labels_and_greys(ImageNet(root=str(root), split="train", num_classes=3)) == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]
    assert labels_and_greys(ImageNet(root=str(root), split="valid", num_classes=3)) == [(0, 0), (1, 1), (2, 2)]
    assert ImageNet(root=str(root), split="train", num_classes=3).classes == list(WNIDS)


def test_a_flat_val_folder_is_labelled_by_the_development_kit(root: Path):
    labels = flat_val(root)
    kit = root / "ILSVRC2012_devkit_t12" / "data"
    kit.mkdir(parents=True)
    # the kit numbers the classes in its own order, and its table also holds synsets that are not classes
    numbers = {2: 1, 0: 2, 1: 3}
    synsets = np.array([(numbers[label], WNIDS[label]) for label in (2, 0, 1)] + [(4, "n00001740")], dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O")])
    scipy.io.savemat(kit / "meta.mat", {"synsets": synsets})
    (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{numbers[label]}\n" for label in labels))
    assert labels_and_greys(ImageNet(root=str(root), split="valid", num_classes=3)) == [(label, label) for label in labels]


def test_a_flat_val_folder_is_labelled_by_kaggles_table(root: Path):
    labels = flat_val(root)
    rows = [f"ILSVRC2012_val_{number:08d},{WNIDS[label]} 1 2 3 4 {WNIDS[label]} 5 6 7 8" for number, label in reversed(list(enumerate(labels, 1)))]
    (root / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "\n".join(rows) + "\n")
    assert labels_and_greys(ImageNet(root=str(root), split="valid", num_classes=3)) == [(label, label) for label in labels]
