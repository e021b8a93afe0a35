"""Images in folders by class, in tables, and the decoding of single files."""

import csv
import json
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
from samewise.datasets.image_table import ImageTable
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
            r"train: has no class folders \(only 2 \.tar files\); hint: dataset=shards reads tar files",
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
    done = samewise("check", "recipe=classification", "dataset=image_folder", "model=resnet18_small", "transforms=images", "dataset.root=s3://bucket/train")
    assert done.stderr.startswith("error: dataset.root: is an address, but this data set reads from the local disk only; hint: copy the data first"), (
        done.stderr
    )


SHARES = {"valid": 0.3, "test": 0.2}
ROWS = [{"file": f"photos/{number}.png", "kind": str(9 + number % 3), "part": ("train", "train", "val")[number % 3]} for number in range(30)]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(30):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path


def write_table(photos: Path, form: str, rows: list[dict[str, str]] = ROWS) -> Path:
    path = photos / f"table.{form}"
    if form == "json":
        path.write_text(json.dumps(rows))
    else:
        with open(path, "w", newline="", encoding="utf-8-sig") as handle:
            writer = csv.DictWriter(handle, list(rows[0]), delimiter="\t" if form == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def load_table(path: Path, split: str = "train", **options: object) -> ImageTable:
    return ImageTable(**{"table_path": str(path), "split": split, "image": "file", "label": "kind", "shares": SHARES, **options})  # type: ignore[arg-type]


def test_faults_in_a_table_are_reported(photos: Path) -> None:
    table = write_table(photos, "csv")
    with pytest.raises(DataError, match=r"table.csv:2: has no column 'kidn'(.|\n)*did you mean 'kind'"):
        load_table(table, label="kidn")
    with pytest.raises(DataError, match="row 2: has nothing in the column 'kind'"):
        load_table(write_table(photos, "json", [ROWS[0], {**ROWS[1], "kind": None}]))
    for form in ("csv", "tsv"):
        with pytest.raises(DataError, match=":3: has nothing in the column 'kind'"):
            load_table(write_table(photos, form, [ROWS[0], {**ROWS[1], "kind": " "}, *ROWS[2:]]))
    with pytest.raises(DataError, match=r"has two class names that look the same: '9 ' \(spelt with U\+0020 SPACE\) and '9'"):
        load_table(write_table(photos, "csv", [{**ROWS[0], "kind": "9 "}, *ROWS[1:]]))
    table = write_table(photos, "csv")
    (photos / "twice.csv").write_text("file,kind,kind\na,1,2\n")
    with pytest.raises(DataError, match="it has two columns 'kind'"):
        load_table(photos / "twice.csv")
    with pytest.raises(DataError, match=r"has 3 classes \(9, 10, 11\)(.|\n)*dataset\.num_classes=3"):
        load_table(table, num_classes=4)
    with pytest.raises(DataError, match=r"is listed in table\.csv but missing, as are \d+ more"):
        load_table(table, root=str(photos / "photos"))
    with pytest.raises(DataError, match="lists a file twice"):
        load_table(write_table(photos, "json", [*ROWS, ROWS[0]]))
    with pytest.raises(DataError, match="lists a file twice"):
        load_table(write_table(photos, "csv", [*ROWS, {**ROWS[0], "file": f"./photos/../{ROWS[0]['file']}"}]))
    with pytest.raises(DataError, match=r"row 2: holds several values in the column 'kind'(.|\n)*\['9', '10'\]"):
        load_table(write_table(photos, "json", [ROWS[0], {**ROWS[1], "kind": ["9", "10"]}]))  # type: ignore[dict-item]
    with pytest.raises(DataError, match="row 2: has nothing in the column 'kind'"):
        load_table(write_table(photos, "json", [ROWS[0], {**ROWS[1], "kind": float("nan")}]))  # type: ignore[dict-item]
    for name, text in (("a.json", "[{"), ("a.parquet", "x")):
        (photos / name).write_text(text)
        with pytest.raises(DataError, match="is not a list of images, or is damaged"):
            load_table(photos / name)
    with pytest.raises(DataError, match=r"the list of images cannot be read(.|\n)*dataset\.table_path"):
        load_table(photos / "none.csv")


@pytest.mark.parametrize(
    ("listed", "cause"),
    [
        ("photos\\1.png", "write '/' between folders, not '\\\\': photos/1.png"),
        ("photos/1.PNG", "the list has '1.PNG', the folder '1.png'"),
        ("photos/1.jpg", "there is 1.png"),
        ("photos/cafe\u0301.png", r"spelt with U\+0301 COMBINING ACUTE ACCENT\), the folder 'caf\u00e9.png' \(spelt with U\+00E9"),
        ("gone/1.png", "dataset.root=FOLDER"),
    ],
)
def test_the_cause_of_a_missing_file_is_named(photos: Path, listed: str, cause: str) -> None:
    (photos / "photos" / "0.png").rename(photos / "photos" / "caf\u00e9.png")
    (photos / "list.csv").write_text(f"file,kind\n{listed},a\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"list\.csv but missing; hint: .*{cause}"):
        load_table(photos / "list.csv", shares={})


@pytest.mark.parametrize(
    ("label", "what"),
    [("caf\u00e9", r"U\+00E9 LATIN SMALL LETTER E WITH ACUTE"), (" cafe\u0301", r"U\+0020 SPACE"), ("cafe\u0301\u200b", r"U\+200B ZERO WIDTH SPACE")],
)
def test_labels_that_differ_only_in_what_cannot_be_seen_are_refused(photos: Path, label: str, what: str) -> None:
    with pytest.raises(DataError, match=rf"two class names that look the same: (.|\n)*{what}"):
        load_table(write_table(photos, "csv", [{**ROWS[0], "kind": "cafe\u0301"}, {**ROWS[1], "kind": label}]), shares={})


@pytest.mark.parametrize("stored", [b"GIF89a", {"bytes": b"GIF89a", "path": "a.gif"}])
def test_a_table_that_contains_its_images_names_the_data_set_that_reads_them(tmp_path: Path, stored: object) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(arrow.table({"file": [stored], "kind": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: has .*binary.* in the column 'file', not text or numbers; hint: dataset=hugging_face_images"):
        load_table(tmp_path / "t.parquet")


def test_a_column_holds_the_weights_of_the_samples(photos: Path) -> None:
    data = load_table(write_table(photos, "csv"), weight="kind")
    assert data.weights.tolist() == [float(data.classes[data[index]["label"]]) for index in range(len(data))]
