"""Data sets that the library `datasets` wrote (tests/datasets/hugging_face/write.py) are read without it: rows, classes and splits are those written."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samewise.datasets.hugging_face import HuggingFaceImages, HuggingFaceRecordings
from samewise.runner.errors import DataError

HERE = Path(__file__).parent / "hugging_face"
SHARES = {"valid": 0.25, "test": 0.1}


def images(root: Path | str, split: str, **settings: Any) -> HuggingFaceImages:
    given: dict[str, Any] = {"image": "photo", "label": "kind", "shares": SHARES} | settings
    return HuggingFaceImages(root=str(root), split=split, **given)  # pyright: ignore[reportArgumentType]


def expected_image(number: int) -> torch.Tensor:
    """uint8[3, 8, 8], as write.py drew it."""
    values = np.random.default_rng(number).integers(0, 60, (8, 8, 3)).astype(np.uint8) + np.uint8(150 * (number % 2))
    return torch.from_numpy(values).permute(2, 0, 1)


def numbers(data: HuggingFaceImages) -> list[int]:
    """The numbers of the images in a split; each image is compared with the one that was written."""
    known = {expected_image(number).numpy().tobytes(): number for number in range(40)}
    found = [known[data[index]["image"].numpy().tobytes()] for index in range(len(data))]
    assert [data[index]["label"] for index in range(len(data))] == [number % 2 for number in found]
    return found


def test_without_splits_the_hash_of_an_image_decides_its_split() -> None:
    found = {split: numbers(images(HERE / "images", split)) for split in ("train", "valid", "test")}
    assert sorted(number for some in found.values() for number in some) == list(range(40))
    assert all(found.values())
    assert images(HERE / "images", "train").classes == ["night", "day"]
    assert numbers(images(HERE / "images", "valid", key="other")) != found["valid"]


@pytest.mark.parametrize("form", ["splits", "parquet"])
def test_existing_splits_are_used_and_missing_ones_come_from_training(form: str) -> None:
    assert numbers(images(HERE / form, "test")) == list(range(30, 40))
    train, valid = numbers(images(HERE / form, "train")), numbers(images(HERE / form, "valid"))
    assert sorted(train + valid) == list(range(30))
    assert valid


def _write_rows(root: Path, rows: Mapping[str, tuple[list[str] | None, Sequence[Any]]], form: str = "parquet") -> Path:
    """A file by name, with the labels and the ClassLabel's names that it has; the image of a row is `expected_image` of its place."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [row["bytes"] for row in parquet.read_table(next((HERE / "parquet").glob("test*"))).column("photo").to_pylist()]
    root.mkdir(exist_ok=True)
    for name, (names, labels) in rows.items():
        features = {"photo": {"_type": "Image"}, "kind": {"_type": "ClassLabel", "names": names}}
        photos = [{"bytes": images[place % len(images)], "path": None} for place in range(len(labels))]
        table = pa.table({"photo": photos, "kind": pa.array(labels)})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})} if names else None)
        if form == "parquet":
            parquet.write_table(table, root / f"{name}.parquet")
            continue
        (root / name).mkdir()
        (root / "dataset_dict.json").write_text(json.dumps({"splits": [*rows]}))
        (root / name / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        with pa.OSFile(str(root / name / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return root


@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_the_numbers_of_a_split_mean_its_own_names(form: str, tmp_path: Path) -> None:
    """As `DatasetDict.class_encode_column` gives them, which numbers the classes of each split alone; the training split's numbering is the model's."""
    kinds = ["bird", "cat", "dog"]
    root = _write_rows(tmp_path / "a", {"test": (["dog", "bird"], [0, 1]), "train": (kinds, [0, 1, 2]), "validation": (["cat", "dog"], [0, 1, 0])}, form)
    splits = {split: images(root, split) for split in ("train", "valid", "test")}
    assert all(data.classes == kinds for data in splits.values())
    labels = {split: [data[index]["label"] for index in range(len(data))] for split, data in splits.items()}
    assert labels == {"train": [0, 1, 2], "valid": [1, 2, 1], "test": [2, 0]}
    mine = images(root, "valid", classes=["dog", "cat", "bird"])
    assert [mine[index]["label"] for index in range(3)] == [1, 0, 1]
    more = _write_rows(tmp_path / "b", {"train": (kinds, [0, 1, 2]), "validation": (["bird", "cow", "dog"], [0, 2, 1])}, form)
    with pytest.raises(DataError, match=r"b, valid: row 2 belongs to an unknown class; .*\n    value: +'cow'"):
        images(more, "train")
    misnumbered = _write_rows(tmp_path / "d", {"train": (["1", "2", "3"], [1, 2, 3])}, form)
    with pytest.raises(DataError, match=r"d, train: row 2 belongs to an unknown class; .*\n    value: +'number 3'"):
        images(misnumbered, "train", shares={})
    unnamed = images(_write_rows(tmp_path / "c", {"train": (kinds, [0, 1, 2]), "validation": (None, [2, 1])}, form), "valid")
    assert [unnamed[index]["label"] for index in range(2)] == [2, 1], "without names, the training split's"


def test_the_fingerprint_depends_on_content_not_on_place_or_format(tmp_path: Path) -> None:
    shutil.copytree(HERE / "splits", tmp_path / "moved")
    here = images(HERE / "splits", "train").fingerprint()
    assert images(tmp_path / "moved", "train").fingerprint() == images(HERE / "parquet", "train").fingerprint() == here
    assert images(HERE / "splits", "train", key="other").fingerprint() != here
    assert images(HERE / "splits", "valid").fingerprint() != here


def test_a_data_set_in_the_librarys_cache_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    folder = tmp_path / "someone___days" / "default" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        shutil.copy(HERE / "splits" / split / "data-00000-of-00001.arrow", folder / f"days-{split}.arrow")
    assert numbers(images("someone/days", "test")) == list(range(30, 40))
    shutil.copytree(folder, folder.with_name("def"))
    with pytest.raises(DataError, match="2 versions or configurations of it are in the cache"):
        images("someone/days", "test")
    with pytest.raises(DataError, match=r"load_dataset\('someone/nights'\)\.save_to_disk"):
        images("someone/nights", "test")


def test_recordings_of_a_speaker_stay_in_one_split() -> None:
    def data(split: str) -> HuggingFaceRecordings:
        given: dict[str, Any] = {"split": split, "seconds": 0.05, "sample_rate": 8000, "id": "who", "shares": {"valid": 0.4}}
        return HuggingFaceRecordings(root=str(HERE / "recordings"), **given)

    train, valid = data("train"), data("valid")
    assert len(train) + len(valid) == 12
    assert len(train) % 2 == len(valid) % 2 == 0
    assert train.classes == ["high", "low"]
    sample = valid[0]
    assert sample["waveform"].shape == (400,)
    assert sample["length"] == 400
    crossings = {split[index]["label"]: int((split[index]["waveform"].diff().sign().diff() != 0).sum()) for split in (train, valid) for index in range(2)}
    assert crossings[0] > 3 * crossings[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: images(root, "train", image="foto"), "has no such column; hint: did you mean 'photo'"),
        (lambda root: images(root, "train", num_classes=3), "has 2 classes (night, day); hint: set dataset.num_classes=2"),
        (lambda root: images(root, "train", classes=["night", "noon"]), "row 1 belongs to an unknown class"),
        (lambda root: images(root, "train", image="kind"), "column kind holds int; hint: dataset.image=COLUMN names another column"),
        (lambda root: images(root / "nothing", "train"), "does not exist"),
        (lambda root: images(_truncate(root), "train"), "cannot be read: Expected"),
        (lambda root: images(_with_script(root), "train"), "contains no data set; hint: dataset=table reads images that a CSV"),
        (lambda root: images(root, "train", classes=["night", "day", "night"]), "has two class names that look the same: 'night' and 'night'"),
    ],
)
def test_faults_are_reported(change: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    shutil.copytree(HERE / "images", tmp_path / "data")
    with pytest.raises(DataError) as caught:
        change(tmp_path / "data")
    assert words in str(caught.value)


def _truncate(root: Path) -> Path:
    file = root / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:900])
    return root


def _with_script(root: Path) -> Path:
    """A data set in the form of a script, which the library used to run."""
    shutil.rmtree(root)
    root.mkdir()
    (root / "data.py").write_text("raise SystemExit('a stranger's code ran')\n")
    return root


def test_paths_in_place_of_images_are_not_followed(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    secret = tmp_path / "secret.png"
    secret.write_bytes(b"")
    parquet.write_table(pa.table({"photo": [{"bytes": None, "path": str(secret)}], "kind": [0]}), tmp_path / "train.parquet")
    with pytest.raises(DataError, match="holds a path, not the content"):
        images(tmp_path / "train.parquet", "train")
