"""Images in folders by class, and the decoding of single files."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image

from samewise.datasets.image_folder import ImageFolder
from samewise.runner.errors import DataError


def picture(*, size: tuple[int, int] = (12, 10), seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A smooth picture of (width, height), which JPEG changes little."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    channels = [(x * 9 + seed * 31) % 256, (y * 11 + seed * 17) % 256, ((x + y) * 5) % 256]
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8)).convert(mode)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """train and valid with the classes ant, bee and Cat; some images lie one folder deeper."""
    for split, count in (("train", 3), ("valid", 2)):
        for number, name in enumerate(("ant", "bee", "Cat")):
            folder = tmp_path / split / name
            (folder / "more").mkdir(parents=True)
            for index in range(count):
                picture(seed=10 * number + index).save(folder / f"{index}.jpg")
            picture(seed=10 * number + 9).save(folder / "more" / "9.PNG")
            (folder / "notes.txt").write_text("no image")
    return tmp_path


def test_files_and_labels_are_those_of_torchvisions_image_folder(root: Path):
    ours, theirs = ImageFolder(root=str(root), folder="train"), torchvision.datasets.ImageFolder(str(root / "train"))
    assert ours.classes == theirs.classes == ["Cat", "ant", "bee"]
    assert [(str(ours.path(index)), ours[index]["label"]) for index in range(len(ours))] == theirs.samples


def test_images_kept_in_memory_are_those_in_the_files(root: Path):
    files, kept = (ImageFolder(root=str(root), folder="train", cache=cache) for cache in ("none", "memory"))
    assert files.batch is None
    batch = kept.batch([5, 0])
    assert torch.equal(batch["image"], torch.stack([files[5]["image"], files[0]["image"]]))
    assert batch["label"].tolist() == [files[5]["label"], files[0]["label"]]
    assert files.fingerprint() == kept.fingerprint()


class Code:
    """What a pickle would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('the pickle was run')",)


def test_arrays_and_tensors_are_those_of_torchvisions_dataset_folder(tmp_path: Path):
    draw = np.random.default_rng(0)
    for number, (name, kind) in enumerate((name, kind) for name in ("ant", "bee") for kind in (np.float64, np.int16, np.uint8)):
        (tmp_path / name).mkdir(exist_ok=True)
        array = (draw.random((3, 2, 4)) * 100).astype(kind)
        np.save(tmp_path / name / f"{number}.npy", array)
        torch.save(torch.from_numpy(array).sum(2), tmp_path / name / f"{number}.pt")
    theirs = torchvision.datasets.DatasetFolder(str(tmp_path), lambda file: np.load(file) if file.endswith("y") else torch.load(file), (".npy", ".pt"))
    ours = ImageFolder(root=str(tmp_path), folder="", mode="tensors")
    assert [(str(ours.path(index)), ours[index]["label"]) for index in range(len(ours))] == theirs.samples
    for index, (value, _) in enumerate(theirs):
        expected = torch.as_tensor(value)
        assert torch.equal(ours[index]["image"], expected.float() if expected.is_floating_point() else expected)
    torch.save(Code(), tmp_path / "ant" / "0.pt")
    (tmp_path / "bee" / "3.npy").write_bytes((tmp_path / "bee" / "3.npy").read_bytes()[:-9])
    for index in (1, 6):
        with pytest.raises(DataError, match=f"{ours.path(index)}: is not an array or a tensor"):
            ours[index]


def test_every_file_of_a_format_that_is_read_is_a_sample_and_others_are_counted(root: Path, samewise: Callable[..., Any], tmp_path: Path):
    before = len(ImageFolder(root=str(root), folder="train"))
    for name in ("4.jfif", "5.JPE", "6.gif", "7.dib"):
        picture(seed=7).save(root / "train" / "ant" / name, {"dib": "BMP", "gif": "GIF"}.get(name[-3:], "JPEG"))
    (root / "train" / "ant" / "8.heic").write_bytes(b"\0\0\0\x18ftypheic")
    picture().save(root / "train" / "beside.gif")
    (root / "train" / "README.md").touch()
    data = ImageFolder(root=str(root), folder="train")
    assert (len(data), data.left_out) == (before + 4, "3 .txt files, 1 .gif file, 1 .heic file")
    at = [data.path(index).name for index in range(len(data))].index("6.gif")
    assert torch.equal(data[at]["image"], torch.from_numpy(np.array(Image.open(data.path(at)).convert("RGB"))).permute(2, 0, 1))
    given = (f"dataset.root={root}", "dataset.num_classes=3", "transforms=images", "model=resnet18_small", "batch_size=2")
    done = samewise("check", "recipe=classification", "dataset=image_folder", *given, f"run_root={tmp_path / 'runs'}")
    assert "leaves out 3 .txt files, 1 .gif file, 1 .heic file; hint" in done.stdout + done.stderr


def packed(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda root: [root.mkdir(), packed(root / "ant.tar"), packed(root / "bee.tar")],
            r"train: has no class folders \(only 2 \.tar files\); hint: unpack the archives",
        ),
        (lambda root: [root.mkdir(), picture().save(root / "0.jpg")], r"train: has no class folders \(only 1 \.jpg file\); expected: a folder for each class"),
        (lambda root: root.mkdir(), r"train: has no class folders \(it is empty\)"),
        (packed, "train: is a tar archive, not a folder; hint: unpack it"),
    ],
)
def test_what_is_there_in_place_of_class_folders_is_named(tmp_path: Path, make: Callable[[Path], Any], message: str):
    make(tmp_path / "train")
    for given in ({"root": str(tmp_path), "folder": "train"}, {"root": str(tmp_path / "train"), "folder": ""}):
        with pytest.raises(DataError, match=message):
            ImageFolder(**given)


def test_a_root_that_is_an_archive_or_missing_is_named_itself(tmp_path: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    packed(tmp_path / "data.tar")
    with pytest.raises(DataError, match=r"data\.tar: is a tar archive, not a folder; hint: unpack it"):
        ImageFolder(root=str(tmp_path / "data.tar"), folder="train")
    monkeypatch.chdir(tmp_path)
    done = samewise("check", "recipe=classification", "dataset=image_folder", "model=resnet18_small", "transforms=images", "dataset.root=none")
    assert done.stderr.startswith("error: dataset.root: this folder does not exist; hint: set dataset.root=FOLDER"), done.stderr
