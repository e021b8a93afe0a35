"""CIFAR and MNIST, on small files in their real formats."""

import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
import torchvision.datasets
from PIL import Image

from samewise.datasets.cifar import CIFAR10, CIFAR100
from samewise.datasets.imagenet import ImageNet
from samewise.datasets.mnist import MNIST, FashionMNIST
from samewise.runner.errors import DataError

NOWHERE = "http://127.0.0.1:9/"  # nothing listens at this port


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five training files of four images and a test file of six, with their checksums set in torchvision."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)

    def write(name: str, content: object) -> list[str]:
        raw = pickle.dumps(content)
        (folder / name).write_bytes(raw)
        return [name, hashlib.md5(raw).hexdigest()]

    def images(count: int) -> dict[str, object]:
        return {"data": rng.integers(0, 256, (count, 3072), dtype=np.uint8), "labels": rng.integers(0, 10, count).tolist()}

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", [write(f"data_batch_{number}", images(4)) for number in range(1, 6)])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "test_list", [write("test_batch", images(6))])
    name, md5 = write("batches.meta", {"label_names": [f"kind {number}" for number in range(10)]})
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", NOWHERE)
    return tmp_path


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    """Eight training and three test images in MNIST's own format, under both names."""
    rng = np.random.default_rng(0)
    for name in ("MNIST", "FashionMNIST"):
        folder = tmp_path / name / "raw"
        folder.mkdir(parents=True)
        for prefix, count in (("train", 8), ("t10k", 3)):
            pixels, labels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count, dtype=np.uint8)
            (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x0803, count, 28, 28) + pixels.tobytes())
            (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x0801, count) + labels.tobytes())
    return tmp_path


def test_cifar_images_and_labels_are_torchvisions(cifar: Path):
    ours, theirs = CIFAR10(root=str(cifar), split="test"), torchvision.datasets.CIFAR10(cifar, train=False)
    assert len(ours) == 6
    assert ours.classes[3] == "kind 3"
    for index, (image, label) in enumerate(theirs):
        assert np.array_equal(ours[index]["image"].permute(1, 2, 0).numpy(), np.asarray(image))
        assert ours[index]["label"] == label


def test_the_last_training_images_form_the_validation_split(cifar: Path):
    train, valid = (CIFAR10(root=str(cifar), split=split, held_out=5) for split in ("train", "valid"))
    whole = CIFAR10(root=str(cifar), split="train", held_out=0)
    assert (len(train), len(valid), len(whole)) == (15, 5, 20)
    joined = torch.cat([train.batch(range(15))["image"], valid.batch(range(5))["image"]])
    assert torch.equal(joined, whole.batch(range(20))["image"])


def test_an_altered_file_is_not_read(cifar: Path):
    with open(cifar / "cifar-10-batches-py" / "data_batch_2", "ab") as handle:
        handle.write(b"x")
    with pytest.raises(DataError, match=r"missing or altered.*dataset\.download=true(.|\n)*data_batch_2"):
        CIFAR10(root=str(cifar), split="train")


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100, MNIST, FashionMNIST])
def test_missing_files_are_reported_with_how_to_get_them(tmp_path: Path, kind: type):
    with pytest.raises(DataError, match=rf"{tmp_path}.*dataset\.root=FOLDER.*dataset\.download=true(.|\n)*a folder "):
        kind(root=str(tmp_path), split="train")


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_mnist_images_and_labels_are_torchvisions(mnist: Path, kind: type):
    theirs = getattr(torchvision.datasets, kind.__name__)(mnist, train=True)
    train, valid = kind(root=str(mnist), split="train", held_out=2), kind(root=str(mnist), split="valid", held_out=2)
    assert (len(train), len(valid), len(kind(root=str(mnist), split="test"))) == (6, 2, 3)
    assert train[0]["image"].shape == (1, 28, 28)
    for index, (image, label) in enumerate(theirs):
        sample = train[index] if index < 6 else valid[index - 6]
        assert np.array_equal(sample["image"][0].numpy(), np.asarray(image))
        assert sample["label"] == label
    assert len(train.classes) == 10


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
