"""Data sets converted to shards: their files and labels unchanged, the same bytes however the work was done, the same training."""

import io
import json
import re
import subprocess
import sys
import tarfile
import time
import venv
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from pyarrow import parquet
from samewise_forked import Forked
from samewise_tiny import DIGITS

from samewise.datasets.coco import COCO
from samewise.datasets.shard_boxes import ShardBoxes
from samewise.runner.conversion.page import describe, page
from samewise.runner.conversion.shards import convert as convert_splits
from samewise.runner.records.digest import value_digest

SHAPE = ["dataset.image_size=8", "dataset.mean=[0.5,0.5,0.5]", "dataset.std=[0.5,0.5,0.5]"]
TRAIN = ["train", *DIGITS, "model.width=8", "transforms=images", "batch_size=12", "order=bijection", "max_steps=5", *SHAPE]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in folders by class, whose names sort in another order than their numbers."""
    root = tmp_path_factory.mktemp("data") / "photos"
    draws = np.random.default_rng(0)
    for split, count in (("train", 50), ("valid", 12)):
        for number in range(count):
            ending = ("png", "bmp")[number % 2]
            place = root / split / ("2", "10", "30")[number % 3] / f"{number // 6:02}.a\u00e9.{ending}"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place)
    return root


def files(root: Path, split: str) -> list[tuple[str, str, bytes]]:
    """Name, label and content of each, in the order of the data set."""
    return [
        (str(x.relative_to(root / split)), x.parent.name, x.read_bytes()) for x in sorted((root / split).glob("*/*"), key=lambda x: (x.parent.name, x.name))
    ]


def digest(folder: Path) -> str:
    return sha256(
        repr([(str(x.relative_to(folder)), x.read_bytes()) for x in sorted(folder.rglob("*")) if x.is_file() and ".samewise" not in x.parts]).encode()
    ).hexdigest()


def read_tar(folder: Path) -> list[tuple[str, str, bytes]]:
    rows = list[tuple[str, str, bytes]]()
    for place in sorted(folder.glob("*.tar")):
        with tarfile.open(place) as archive:
            members = [(x.name, archive.extractfile(x).read()) for x in archive]  # pyright: ignore[reportOptionalMemberAccess]
        assert all(name.rpartition(".")[0] == other.rpartition(".")[0] for (name, _), (other, _) in zip(members[::2], members[1::2], strict=True))
        rows += [(name, json.loads(described)["label"], raw) for (name, raw), (_, described) in zip(members[::2], members[1::2], strict=True)]
    return rows


def read_parquet(folder: Path) -> list[tuple[str, str, bytes]]:
    return [(x["__key__"], x["label"], x["image"]) for place in sorted(folder.glob("*.parquet")) for x in parquet.read_table(place).to_pylist()]


def convert(samewise: Callable[..., Any], photos: Path, out: Path, *arguments: object) -> str:
    return str(samewise("data", "convert", "dataset=image_folder", f"dataset.root={photos}", "--out", out, *arguments, code=0).stdout)


def trace(run_root: Path) -> bytes:
    (path,) = run_root.glob("*/*/trace.jsonl")
    return path.read_bytes().partition(b"\n")[2]


@pytest.mark.parametrize(("kind", "read"), [("tar", read_tar), ("parquet", read_parquet), ("mds", None)])
def test_the_files_are_copied_as_they_are_and_train_as_before(
    kind: str, read: Callable[..., Any] | None, photos: Path, tmp_path: Path, samewise: Callable[..., Any]
) -> None:
    said = convert(samewise, photos, tmp_path / "shards", "--to", kind, "--samples", 20, "--processes", 1)
    assert "50 samples in 3 shards" in said
    assert "12 samples in 1 shard" in said
    for split in ("train", "valid") if read else ():
        expected = files(photos, split)
        rows = read(tmp_path / "shards" / split)
        assert [row[1:] for row in rows] == [row[1:] for row in expected]
        # A member's ending begins at the first dot, and samples that differ only in theirs get a number
        names = [re.sub(r"-\d+(?=\.)", "", row[0]).replace("_a", ".a") if kind == "tar" else row[0] for row in rows]
        assert names == [row[0] for row in expected]
    if kind == "parquet":
        assert {parquet.ParquetFile(x).num_row_groups for x in tmp_path.glob("shards/*/*.parquet")} == {1}
    for name, dataset in (("shards", "shards"), ("files", "image_folder")):
        root = tmp_path / "shards" if name == "shards" else photos
        samewise(*TRAIN, f"dataset={dataset}", f"dataset.root={root}", "dataset.num_classes=3", f"run_root={tmp_path / name}-runs", code=0)
    assert trace(tmp_path / "shards-runs") == trace(tmp_path / "files-runs")


@pytest.mark.parametrize("kind", ["tar", "parquet", "mds"])
def test_a_conversion_killed_on_two_processes_is_finished_on_one_with_the_same_bytes(
    kind: str, photos: Path, tmp_path: Path, samewise: Callable[..., Any]
) -> None:
    options = ["--to", kind, "--samples", "1", "--shuffle", "seed=3"]
    # As if it had been stopped at its beginning
    (tmp_path / "whole.partial").mkdir()
    convert(samewise, photos, tmp_path / "whole", *options, "--processes", 1)
    out, partial = tmp_path / "killed", tmp_path / "killed.partial"
    command = ["data", "convert", "dataset=image_folder", f"dataset.root={photos}", "--out", str(out), *options, "--processes", "2"]
    process = Forked(*command, said=tmp_path / "said")
    while process.poll() is None and not [*partial.glob(f"train/*.{kind}")]:
        time.sleep(0.001)
    process.kill()
    process.wait(60)
    kept = {x.name: x.stat().st_ino for x in partial.glob(f"train/*.{kind}")}
    assert 0 < len(kept) < 50
    assert not out.exists()
    samewise(*command[:-1], "1", code=0)
    assert kept.items() <= {x.name: x.stat().st_ino for x in out.glob("train/*")}.items()
    assert digest(out) == digest(tmp_path / "whole")
    assert not partial.exists()
    assert "50 samples in 50 shards" in samewise(*command, code=0).stdout
    assert "does not hold these data with these options" in samewise(*command, "seed=4", code=2).stderr
    order = [raw for _, _, raw in read_tar(out / "train")] if kind == "tar" else []
    if kind == "tar":
        samewise("data", "convert", out, "--to", "parquet", "--out", tmp_path / "again", "--mib", 1, code=0)
        assert read_parquet(tmp_path / "again" / "train") == read_tar(out / "train")
        # Shards where folders of classes are expected
        (tmp_path / "classes" / "train").mkdir(parents=True)
        (out / "train").rename(tmp_path / "classes" / "train" / "cat")
        assert (
            "hint: dataset=shards dataset.root=" in samewise("data", "inspect", "dataset=image_folder", f"dataset.root={tmp_path / 'classes'}", code=2).stderr
        )
    assert order != [raw for _, _, raw in files(photos, "train")]
    assert len(set(order)) in (0, 50)


def test_recordings_with_transcripts_and_texts_are_converted(tmp_path: Path, samewise: Callable[..., Any]) -> None:
    draws, rows = np.random.default_rng(0), list[str]()
    for number in range(4):
        soundfile.write(tmp_path / f"{number}.flac", draws.uniform(-1, 1, 800), 8000)
        rows.append(f'{{"audio": "{number}.flac", "text": "{"abcd"[number]} word", "duration": 0.1}}\n')
    for split in ("train", "valid"):
        (tmp_path / f"{split}.json").write_text("".join(rows))
        (tmp_path / f"{split}.csv").write_text("text,label\n" + "".join(f'"text, {number}",{"xy"[number % 2]}\n' for number in range(4)))
    manifests = [f"dataset.{split}_file={tmp_path / split}.json" for split in ("train", "valid")]
    done = samewise("data", "convert", "dataset=manifest", *manifests, "--to", "parquet", "--out", tmp_path / "a", "--processes", 1, code=0)
    assert f"train on them with dataset=shard_utterances dataset.root={tmp_path / 'a'}\n" in done.stdout
    recordings = parquet.read_table(tmp_path / "a" / "train").to_pylist()
    assert recordings == [
        {"__key__": f"{number}.flac", "audio": (tmp_path / f"{number}.flac").read_bytes(), "text": f"{'abcd'[number]} word"} for number in range(4)
    ]
    assert "train: 4 samples; " in samewise("data", "inspect", tmp_path / "a", "--out", tmp_path / "a.html", code=0).stdout
    (tmp_path / "a" / "conversion.json").unlink()
    assert "hint: dataset=shard_utterances dataset.root=FOLDER reads such samples" in samewise("data", "inspect", tmp_path / "a", code=2).stderr
    # Before the data are looked for
    assert "--out: exists" in samewise("data", "convert", "dataset=manifest", "--out", tmp_path / "a", code=2).stderr
    tables = [f"dataset.{split}_file={tmp_path / split}.csv" for split in ("train", "valid")]
    samewise("data", "convert", "dataset=text_table", *tables, "--to", "tar", "--out", tmp_path / "b", "--processes", 1, code=0)
    assert read_tar(tmp_path / "b" / "train") == [(f"{number:08}.txt", "xy"[number % 2], f"text, {number}".encode()) for number in range(4)]


@pytest.mark.parametrize("kind", ["tar", "parquet", "mds"])
def test_boxes_are_read_from_shards_as_from_cocos_file(kind: str, tmp_path: Path) -> None:
    draws, described = np.random.default_rng(0), dict[str, list[Any]](images=[], annotations=[])
    for number in range(9):
        Image.fromarray(draws.integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
        described["images"].append({"id": number, "file_name": f"{number}.png", "width": 32, "height": 24})
        for _ in range(number % 3):
            box = [*draws.uniform(1, 10, 2).tolist(), *draws.uniform(1, 12, 2).tolist()]
            entry = {"image_id": number, "category_id": 1 + number % 2, "bbox": box, "iscrowd": number // 8, "area": draws.uniform(1, 9)}
            described["annotations"].append({"id": len(described["annotations"]), **entry})
    names = [{"id": 2, "name": "ant"}, {"id": 1, "name": "bee"}]
    (tmp_path / "boxes.json").write_text(json.dumps({**described, "categories": names}))
    splits: dict[str, Any] = {split: COCO(root=str(tmp_path), images="", annotations="boxes.json", training=split == "train") for split in ("train", "valid")}
    convert_splits(splits, tmp_path / "out", kind, samples=4, mib=1, seed=None, processes=1, show=lambda items, total: items)
    for split, files in splits.items():
        shards = ShardBoxes(root=str(tmp_path / "out"), split=split, training=split == "train", shares={})  # type: ignore[arg-type]
        assert shards.classes == files.classes
        # A second conversion copies the images, not the shards
        convert_splits({split: shards}, tmp_path / f"again-{split}", kind, samples=4, mib=1, seed=None, processes=1, show=lambda items, total: items)
        assert digest(tmp_path / f"again-{split}" / split) == digest(tmp_path / "out" / split)
        facts = {split: describe(shards)}
        assert facts[split]["labels"] == dict(Counter(names for x in range(len(files)) for names in [y["category"] for y in files.fields(x)[1]["objects"]]))
        shown = page("", {split: shards}, facts)
        assert shown.count("<rect ") == sum(facts[split]["labels"].values()) > 5
        assert {x: shown.count(f">{x}</text>") for x in ("ant", "bee")} == facts[split]["labels"]
        assert value_digest([{**shards[x], "image_id": 0} for x in range(len(shards))]) == value_digest(
            [{**files[x], "image_id": 0} for x in range(len(files))]
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dataset=digits", "--to", "tar", "--out", "x"], "dataset.train: has no files, each of which is a sample"),
        (["dataset=image_folder", "--to", "zip", "--out", "x"], "expected: one of: tar, parquet, mds"),
        (["dataset=image_folder", "--to", "tar", "--out", "x", "--samples", "0"], "--samples: must be at least 1"),
        (["dataset=image_foldr", "--to", "tar", "--out", "x"], "did you mean 'image_folder'?"),
        (["dataset=image_folder", "--to", "tar", "--out", "x"], "dataset.root: this folder does not exist"),
        (["x", "--out", "s3://bucket/x"], "--out: is not a place on this disk; hint: write here, then copy it"),
    ],
)
def test_what_cannot_be_converted_is_named(arguments: list[str], said: str, here: Path, samewise: Callable[..., Any]) -> None:
    assert said in samewise("data", "convert", *arguments, code=2).stderr
    assert not [*here.iterdir()]


def test_a_page_shows_labels_sizes_pictures_sounds_and_texts(photos: Path, here: Path, samewise: Callable[..., Any]) -> None:
    said = samewise("data", "inspect", "dataset=image_folder", f"dataset.root={photos}", "--out", "photos.html", code=0).stdout
    assert "train: 50 samples, 3 labels; " in said
    page_of_photos = Path("photos.html").read_text()
    pictures = [Image.open(io.BytesIO(b64decode(x))) for x in re.findall(r'data:image/jpeg;base64,([^"]+)"', page_of_photos)]
    assert [x.size for x in pictures] == [(8, 8)] * (24 + 12)
    assert "<td>10<td>17<td>" in page_of_photos
    assert "hint: dataset=image_folder dataset.root=FOLDER" in samewise("data", "inspect", photos, code=2).stderr
    sound = np.random.default_rng(0).uniform(-1, 1, 800).astype(np.float32)
    for split in ("train", "valid"):
        for label in ("<b>", "c"):
            (here / split / label).mkdir(parents=True)
            soundfile.write(here / split / label / "1.flac", sound, 8000)
            (here / split / label / "1.txt").write_text("a & b")
    recordings = ["dataset=labelled_recordings", "dataset.root=train", "dataset.shares={valid: 0.5, test: 0}", "--out", "sounds.html"]
    facts = json.loads(samewise("data", "inspect", *recordings, "--json", code=0).stdout)
    assert sum(x["samples"] for x in facts.values()) == 2
    embedded = re.findall(r'data:audio/wav;base64,([^"]+)"', Path("sounds.html").read_text())
    assert [soundfile.read(io.BytesIO(b64decode(x)))[0].tolist() for x in embedded] == [soundfile.read("train/c/1.flac")[0].tolist()] * 2
    samewise("data", "inspect", "dataset=text_folder", "dataset.root=.", code=0)
    text = Path("data.html").read_text()
    assert text.count("&lt;b&gt;<br>a &amp; b") == 2
    assert "<b>" not in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mosaics_library_reads_the_files_from_mds(photos: Path, tmp_path: Path, samewise: Callable[..., Any]) -> None:
    convert(samewise, photos, tmp_path / "mds", "--to", "mds", "--samples", 20)
    venv.create(tmp_path / "venv")
    packages = next(tmp_path.glob("venv/lib/python3*/site-packages"))
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({str(Path(np.__file__).parents[1])!r})")
    wanted = ["mosaicml-streaming", "Brotli", "python-snappy", "cramjam", "zstd", "catalogue"]
    pip = [sys.executable, "-m", "pip", "install", "--retries=0", "--no-deps", "--only-binary=:all:", "--target", str(packages), *wanted]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"mosaicml-streaming cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    code = """import sys, streaming
for x in streaming.StreamingDataset(local=sys.argv[1], shuffle=False, batch_size=1):
    print(repr((x["__key__"], x["label"], x["image"])))"""
    for split in ("train", "valid"):
        command = [str(tmp_path / "venv" / "bin" / "python"), "-c", code, str(tmp_path / "mds" / split)]
        read = subprocess.run(command, capture_output=True, text=True, check=True)
        assert read.stdout.splitlines() == [repr(row) for row in files(photos, split)]
