"""Samples in shards: read as those of files, from an index that notices every change."""

import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from pyarrow import parquet
from samewise_datasets_shard_files import FORMATS, litdata, mds, rows_of
from samewise_datasets_shard_files import write as write_rows

from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.labelled_recordings import LabelledRecordings
from samewise.datasets.parts.encoded import EncodedImages
from samewise.datasets.shards import ShardImages, ShardRecordings
from samewise.datasets.transforms.decode import Decode
from samewise.recipes.classification import Classification
from samewise.runner.errors import ConfigError, DataError
from samewise.runner.shards import index as indexing
from samewise.runner.shards.index import open_index

Samples = list[tuple[str, str, bytes]]
"""Name, label and content of each."""
SHARES = {"valid": 0.3, "test": 0.2}


def pictures(folder: Path, count: int = 24) -> Samples:
    """Pictures in folders by class, and their list in the order of the folders."""
    draws = np.random.default_rng(0)
    for number in range(count):
        place = folder / "train" / ("ant", "bee", "cat")[number % 3] / f"{number:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place)
    files = sorted((folder / "train").glob("*/*"))
    return [(f"{file.parent.name}/{file.name}", file.parent.name, file.read_bytes()) for file in files]


VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    **{name: (name, {}) for name in FORMATS},
    "tar with long names": ("tar", {"prefix": "long/" * 50}),
    "tar with long names of POSIX": ("tar as webdataset writes it", {"prefix": "\u00e9/" * 90}),
    "tar with .json": ("tar", {"labels": "json"}),
}


def write(folder: Path, samples: Samples, name: str = "tar", *, size: int = 10) -> Path:
    form, settings = VARIANTS[name]
    return write_rows(folder, rows_of(samples, name, **settings), form, size=size)


@pytest.mark.parametrize("name", VARIANTS)
def test_samples_in_shards_are_those_of_files(tmp_path: Path, name: str) -> None:
    samples = pictures(tmp_path / "files")
    files = ImageFolder(root=str(tmp_path / "files"), folder="train")
    write(tmp_path / "shards" / "train", samples, name)
    shards = ShardImages(root=str(tmp_path / "shards"), split="train", shares=SHARES, window=2)
    assert shards.classes == files.classes
    assert torch.equal(shards.labels, files.labels)
    order = torch.randperm(len(files)).tolist()
    for data in (shards, pickle.loads(pickle.dumps(shards))):
        for place in order:
            assert torch.equal(data[place]["image"], files[place]["image"])
            assert data[place]["label"] == files[place]["label"]
    assert not len(ShardImages(root=str(tmp_path / "shards"), split="test", shares=SHARES))


WRITERS = {
    "webdataset": (
        "webdataset==1.0.2 braceexpand",
        """
import webdataset
with webdataset.ShardWriter(f"{out}/%04d.tar", maxcount=10) as writer:
    for name, label, raw in samples:
        writer.write({"__key__": name.rpartition(".")[0], "png": raw, "cls": label})
""",
    ),
    "mosaicml-streaming": (
        "mosaicml-streaming==0.13.0 zstd brotli python-snappy cramjam catalogue",
        """
from streaming import MDSWriter
encodings = {"bytes": "bytes", "image": "png", "raw": "pil", "label": "str", "row": "int", "place": "uint16", "share": "float32", "digits": "str_int", "json": "json"}
with MDSWriter(out=out, columns=encodings | {"array": "ndarray:int16"}, size_limit=3000) as writer:
    for row, (name, label, raw) in enumerate(samples):
        numbers = {"row": row, "place": row, "share": row / 32, "digits": row, "array": np.arange(4, dtype=np.int16)}
        writer.write({"bytes": raw, "image": Image.open(io.BytesIO(raw)), "raw": Image.open(io.BytesIO(raw)), "label": label, "json": {"kind": label}, **numbers})
""",
    ),
    "litdata": (
        "litdata==0.2.76 boto3 botocore jmespath s3transfer",
        """
import litdata
def sample(place):
    name, label, raw = samples[place]
    return {"bytes": raw, "image": raw, "raw": Image.open(io.BytesIO(raw)).convert("RGB"), "label": label, "kind": {"row": place, "share": place / 32}}
if __name__ == "__main__":
    litdata.optimize(fn=sample, inputs=list(range(len(samples))), output_dir=out, chunk_size=10, num_workers=1)
""",
    ),
    # Records as TensorFlow Datasets writes them: a feature has a list of bytes (1), floats (2) or whole numbers (3)
    "array_record": (
        "array_record==0.8.6",
        """
import struct
from array_record.python.array_record_module import ArrayRecordWriter
def field(number, content):
    size, low = bytes([len(content) & 127 | 128, len(content) >> 7 & 127 | 128, len(content) >> 14]), number << 3 | 2
    return bytes([low]) + size + content
def number(value):
    return bytes([value])
for start in range(0, len(samples), 10):
    writer = ArrayRecordWriter(f"{out}/pictures-train.array_record-{start // 10:05}-of-00003", "group_size:1")
    for row, (name, label, raw) in enumerate(samples[start : start + 10], start):
        features = {"image": field(1, field(1, raw)), "label": field(1, field(1, label.encode())), "row": field(3, field(1, number(row)))}
        features["share"] = field(2, field(1, struct.pack("<f", row / 32)))
        writer.write(field(1, b"".join(field(1, field(1, key.encode()) + field(2, value)) for key, value in features.items())))
    writer.close()
""",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("package", WRITERS)
def test_shards_written_by_other_packages_are_read(tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, shards = pictures(tmp_path / "files"), tmp_path / "shards" / "train"
    shards.mkdir(parents=True)
    packages, script = WRITERS[package]
    pip = [sys.executable, "-m", "pip", "install", "--retries=0", "--no-deps", "--only-binary=:all:", "--target", str(tmp_path / "packages")]
    installed = subprocess.run([*pip, *packages.split()], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{package} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    head = f"import io, pickle, sys\nimport numpy as np\nfrom PIL import Image\nsys.path.append({str(tmp_path / 'packages')!r})\nout = {str(shards)!r}\n"
    (tmp_path / "samples").write_bytes(pickle.dumps(samples))
    (tmp_path / "write.py").write_text(f"{head}samples = pickle.load(open({str(tmp_path / 'samples')!r}, 'rb'))\n{script}")
    # litData empties the folders `data` and `chunks` of the folder of temporary files
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    written = subprocess.run([sys.executable, str(tmp_path / "write.py")], env=environment, capture_output=True, text=True, check=False)
    assert written.returncode == 0, written.stderr
    files = ImageFolder(root=str(tmp_path / "files"), folder="train")
    if package == "array_record":
        monkeypatch.syspath_prepend(tmp_path / "packages")
    for image in ["image"] if package in ("webdataset", "array_record") else ["bytes", "image", "raw"]:
        read = ShardImages(root=str(shards.parent), split="train", shares=SHARES, image=image)
        assert len(read) == len(files)
        for place in range(len(files)):
            assert torch.equal(read[place]["image"], files[place]["image"])
            assert read[place]["label"] == files[place]["label"]
    if package == "webdataset":
        return
    names = {"mosaicml-streaming": ["row", "place", "digits"], "litdata": ["kind.row"], "array_record": ["row"]}[package]
    for column in names:
        index = open_index(str(shards), column)
        assert [index.labels[x] for x in index.samples["label"]] == [*map(str, range(24))]
    share = "kind.share" if package == "litdata" else "share"
    assert [index.read(place, [share], units=1)[1][share] for place in range(24)] == [place / 32 for place in range(24)]
    if package == "mosaicml-streaming":
        with pytest.raises(DataError, match=r"column array: has an encoding that is not read"):
            index.read(0, ["array"], units=1)
        assert open_index(str(shards), "kind").labels == ["ant", "bee", "cat"]


def test_recordings_in_shards_are_those_of_files(tmp_path: Path) -> None:
    draws, samples = np.random.default_rng(0), Samples()
    for number in range(6):
        place = tmp_path / "files" / f"{number % 2}_{number}.wav"
        place.parent.mkdir(exist_ok=True)
        soundfile.write(place, draws.uniform(-0.5, 0.5, 300 + 900 * number), 8000)
        samples.append((place.name, str(number % 2), place.read_bytes()))
    common: dict[str, Any] = {"split": "train", "shares": {}, "seconds": 0.2, "sample_rate": 4000}
    files = LabelledRecordings(root=str(tmp_path / "files"), pattern=r"(?P<label>\d)_.*", **common)
    shards = ShardRecordings(root=str(write(tmp_path / "shards", sorted(samples))), **common)
    for place in range(6):
        pair = []
        for data in (files, shards):
            torch.manual_seed(place)
            pair.append(data[place])
        assert torch.equal(*(sample.pop("waveform") for sample in pair))
        assert pair[0] == pair[1]


def test_a_hash_splits_one_folder_and_further_shards_move_no_sample(tmp_path: Path) -> None:
    samples = pictures(tmp_path / "files", 60)

    def images(root: Path, split: str) -> set[bytes]:
        data = ShardImages(root=str(root), split=split, shares=SHARES, classes=["ant", "bee", "cat"])  # type: ignore[arg-type]
        assert sum(data.shard_sizes) == len(data)
        return {data[place]["image"].numpy().tobytes() for place in range(len(data))}

    few, many = write(tmp_path / "few", samples[:40]), write(tmp_path / "many", samples)
    parts = [(images(few, split), images(many, split)) for split in ("train", "valid", "test")]
    assert all(before <= after for before, after in parts)
    assert sum(len(after) for _, after in parts) == len(set.union(*(after for _, after in parts))) == 60


def test_the_same_shards_give_the_same_index_also_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "whole", pictures(tmp_path / "files"), size=4)
    shutil.copytree(whole, tmp_path / "again")
    index = open_index(str(whole), "label")
    damaged, scanned = tmp_path / "again" / "0012.tar", list[str]()
    state, content, scan = damaged.stat(), damaged.read_bytes(), indexing._scan
    monkeypatch.setattr(indexing, "_scan", lambda path, *given: (scanned.append(Path(path).name), scan(path, *given))[1])
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    damaged.write_bytes(content[:-9000])
    with pytest.raises(DataError, match=r"0012\.tar: cannot be read, or is damaged: .*cut short"):
        open_index(str(damaged.parent), "label")
    before = scanned.copy()
    damaged.write_bytes(content)
    os.utime(damaged, ns=(state.st_atime_ns, state.st_mtime_ns))
    again = open_index(str(damaged.parent), "label")
    assert [again.path.with_suffix(x).read_bytes() for x in (".shards", ".samples")] == [
        index.path.with_suffix(x).read_bytes() for x in (".shards", ".samples")
    ]
    assert scanned == [*before, "0012.tar", "0016.tar", "0020.tar"]
    shutil.copy(damaged, damaged.with_name("0024.tar"))
    assert open_index(str(damaged.parent), "label").samples[:24].tolist() == index.samples.tolist()
    assert scanned[len(before) + 3 :] == ["0024.tar"]


def cut_in_place(place: Path) -> None:
    place.write_bytes(place.read_bytes()[:-20_000])


def change_a_byte(place: Path) -> None:
    place.write_bytes(place.read_bytes().replace(b"IDAT", b"iDAT", 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, r"0010\.tar: is missing, but was there when it was indexed; hint: restore it"),
        (cut_in_place, r"0010\.tar: cannot be read, or is damaged: .*cut short"),
        (change_a_byte, r"0010\.tar: has other content than when it was indexed; hint: restore it"),
    ],
)
def test_a_shard_that_changed_is_named(tmp_path: Path, samewise: Callable[..., Any], change: Callable[[Path], Any], message: str) -> None:
    folder = write(tmp_path / "shards", pictures(tmp_path / "files"))
    before = open_index(str(folder), "label").path.read_bytes()
    data = ShardImages(root=str(folder), split="train")
    os.utime(folder / "0000.tar", ns=(1, 1))  # a copy has another time and the same content
    assert len(open_index(str(folder), "label").samples) == 24
    change(folder / "0010.tar")
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            open_index(str(folder), "label")
    if change is cut_in_place:
        with pytest.raises(DataError, match=r"0010\.tar: cannot be read, or is damaged: it ends at byte"):
            [data[place] for place in range(20)]
    assert samewise("data", "index", folder).returncode == 2 * (change is cut_in_place)
    assert change is cut_in_place or open_index(str(folder), "label").path.read_bytes() != before


def test_verify_names_all_shards_that_differ_and_leaves_the_index_as_it_is(tmp_path: Path, samewise: Callable[..., Any]) -> None:
    folder = write(tmp_path / "shards", pictures(tmp_path / "files"))
    assert "has no index of this label" in samewise("data", "verify", folder, code=2).stderr
    samewise("data", "index", folder)
    samewise("data", "verify", folder)
    before, (first, second, *_) = open_index(str(folder), "label").path.read_bytes(), sorted(folder.glob("*.tar"))
    shutil.copy(first, folder / "0005.tar")
    state = first.stat()
    change_a_byte(first)
    os.utime(first, ns=(state.st_atime_ns, state.st_mtime_ns))
    second.unlink()
    errors = samewise("data", "verify", folder, code=2).stderr
    assert f"{first}: has other content than when it was indexed" in errors
    assert f"{second}: is missing, but was there when it was indexed" in errors
    assert f"{folder}/0005.tar: is not in the index" in errors
    assert next((folder / ".samewise").glob("label.shards")).read_bytes() == before


@pytest.mark.parametrize(
    ("samples", "settings", "message"),
    [
        (
            [("a.png", "1", b""), ("b.png", "0", b""), ("a.jpg", "1", b"")],
            {},
            r"sample a: comes twice, or has two members of one ending; hint: tar --sort=name",
        ),
        ([("a.png", "", b"")], {}, r"sample a: has no single label 'label'; hint: dataset\.label=NAME"),
        ([("a.png", "1", b"")], {"label": "kind"}, r"sample a: has no single label 'kind'; hint: dataset\.label=NAME"),
        ([("a.png", "1", b"\x89PNG")], {"label": "png"}, r"sample a: has no single label 'png'; hint: dataset\.label=NAME"),
        ([("a.dat", "1", b"")], {}, r"0000\.tar, a: has no image; hint: dataset\.image=NAME(.|\n)*'cls', 'dat'"),
        ([("a.txt", "", b"")], {}, r"sample a: has no single label 'label'; hint: dataset=shard_texts"),
        ([("a.txt", "1", b"")], {}, r"0000\.tar, a: has no image; hint: dataset=shard_texts dataset\.root=FOLDER reads such samples(.|\n)*'cls', 'txt'"),
        ([("a.png", "1", b"x")], {}, r"0000\.tar, a\.png: is a text file, not an image"),
        ([("a.png", "1", b"")], {"num_classes": 2}, r"has 1 classes \(1\); hint: set dataset\.num_classes=1"),
        ([("a.png", "1", b"")], {"classes": ["x"]}, r"belongs to an unknown class"),
    ],
)
def test_wrong_shards_are_refused(tmp_path: Path, samples: Samples, settings: Any, message: str) -> None:
    root = write(tmp_path, samples)
    with pytest.raises(DataError, match=message):
        ShardImages(root=str(root), split="train", shares={}, **settings)[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parquet", r"0000\.parquet: has no column of this name; hint: did you mean 'image'\?"),
        ("arrow file", r"0000\.arrow: has no column of this name; hint: did you mean 'image'\?"),
        ("mds", r"0000\.mds: has no column of this name; hint: did you mean 'image'\?"),
        ("litdata", r"0000\.bin: has no column of this name; hint: did you mean 'image'\?"),
    ],
)
def test_the_nearest_column_is_named(tmp_path: Path, name: str, message: str) -> None:
    root = write(tmp_path / "shards", pictures(tmp_path / "files"), name)
    with pytest.raises(DataError, match=message):
        ShardImages(root=str(root), split="train", shares={}, image="imgae")[0]
    with pytest.raises(DataError, match=message.replace("image", "label")):
        ShardImages(root=str(root), split="train", shares={}, label="lable")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda place: shutil.move(place, f"{place}.zstd"), r"has compressed shards, .* hint: unpack them: gunzip"),
        (lambda place: place.write_bytes(place.read_bytes()[:-9]), r"0000\.mds: cannot be read, or is damaged: a sample has"),
        (lambda place: place.write_bytes(place.read_bytes()[:9]), r"0000\.mds: cannot be read, or is damaged: "),
        (lambda place: mds(place, [{"image": b"a", "label": "b"}], "pkl"), r"column image: has an encoding that is not read; expected: bytes,(.|\n)*'pkl'"),
        (
            lambda place: litdata(place.with_suffix(".bin"), [{"image": b"a", "label": "b"}], compression="zstd"),
            r"index\.json: describes chunks that are not read",
        ),
    ],
)
def test_chunks_that_cannot_be_read_are_refused(tmp_path: Path, how: Callable[[Path], Any], message: str) -> None:
    root = write(tmp_path / "shards", pictures(tmp_path / "files"), "mds")
    how(root / "0000.mds")
    with pytest.raises(DataError, match=message):
        ShardImages(root=str(root), split="train", shares={})[0]


def join(place: Path) -> None:
    place.write_bytes(place.read_bytes() + (place.parent / "0010.tar").read_bytes())


def damage(header: int, start: int, content: bytes, place: Path) -> None:
    """Write over a member's header."""
    with tarfile.open(place) as archive:
        offset = archive.getmembers()[header].offset
    raw = place.read_bytes()
    place.write_bytes(raw[: offset + start] + content + raw[offset + start + len(content) :])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (join, r"bytes follow the end of the archive at byte 20,480: it is damaged there, or was joined by cat"),
        (partial(damage, 4, 0, bytes(1024)), r"bytes follow the end of the archive at byte 4,096: it is damaged there"),
        (partial(damage, 4, 2, b"\0\0"), r"the header checksum at byte 4,096 is wrong"),
        (partial(damage, 4, 148, b"x"), r"the header checksum at byte 4,096 is wrong"),
    ],
)
def test_no_sample_of_a_damaged_tar_file_is_lost_in_silence(tmp_path: Path, how: Callable[[Path], Any], message: str) -> None:
    root = write(tmp_path / "shards", pictures(tmp_path / "files"))
    how(root / "0000.tar")
    with pytest.raises(DataError, match=rf"0000\.tar: cannot be read, or is damaged: {message}"):
        ShardImages(root=str(root), split="train", shares={})


@pytest.mark.parametrize(("root", "message"), [("", "dataset.root: names no folder"), ("s3://", "dataset.root: names no bucket")])
def test_a_root_without_a_name_is_named(samewise: Callable[..., Any], root: str, message: str) -> None:
    assert (
        samewise("check", "experiment=resnet18_digits", "dataset=shards", f"dataset.root={root}", code=2)
        .stderr.splitlines()[-2]
        .startswith(f"error: {message}")
    )


def test_two_sets_read_by_turns_unpack_each_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, unpacked, read = pictures(tmp_path / "files", 8), list[int](), parquet.ParquetFile.read_row_group
    sets = [ShardImages(root=str(write(tmp_path / name, samples, "parquet")), split="train", shares={}, window=1) for name in "ab"]
    monkeypatch.setattr(
        parquet.ParquetFile, "read_row_group", lambda self, number, *given, **named: (unpacked.append(number), read(self, number, *given, **named))[1]
    )
    for place in range(8):
        assert torch.equal(*(data[place]["image"] for data in sets))
    assert unpacked == [0, 0, 1, 1]


@pytest.mark.parametrize(("orientation", "turned"), [(1, lambda image: image), (2, lambda image: image.flip(2)), (6, lambda image: image.rot90(-1, (1, 2)))])
def test_images_in_shards_are_turned_upright_or_left_to_the_device(tmp_path: Path, orientation: int, turned: Callable[[torch.Tensor], torch.Tensor]) -> None:
    exif, stored = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)).save(stored, "JPEG", exif=exif)
    root = str(write(tmp_path / "shards", [("a.jpg", "1", stored.getvalue())]))
    as_stored, upright, encoded = (ShardImages(root=root, split="train", shares={}, **x)[0] for x in ({}, {"upright": True}, {"decode": "device"}))  # type: ignore[arg-type]
    assert as_stored["image"].shape == (3, 24, 40)
    assert torch.equal(upright["image"], turned(as_stored["image"]))
    batch = Classification(num_classes=1).collate([encoded])
    assert isinstance(batch["image"], EncodedImages)
    assert torch.equal(Decode()(batch)["image"][0], as_stored["image"])


def test_an_image_that_the_device_decodes_cannot_be_turned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode: cannot be combined with dataset\.upright"):
        ShardImages(root=str(tmp_path), split="train", shares={}, decode="device", upright=True)
