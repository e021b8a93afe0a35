"""Boxes, texts and transcripts in shards are those of files; sizes are in the index."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from samewise_datasets_shard_files import write

from samewise.datasets.coco import COCO
from samewise.datasets.labelled_texts import TextTable
from samewise.datasets.manifest import Manifest
from samewise.datasets.shard_boxes import ShardBoxes
from samewise.datasets.shard_documents import ShardDocuments
from samewise.datasets.shard_utterances import ShardUtterances
from samewise.datasets.shards import ShardTexts
from samewise.datasets.text_files import TextFiles
from samewise.runner.errors import DataError

KINDS = ("tar", "parquet", "mds", "arrow file")
SHARES = {"valid": 0.3}


def require_same(one: Any, other: Any) -> None:
    assert len(one) == len(other)
    for place in range(len(one)):
        a, b = one[place], other[place]
        assert a.keys() == b.keys()
        assert all(torch.equal(a[x], b[x]) if isinstance(a[x], torch.Tensor) else a[x] == b[x] for x in a)


def cells(root: Path, count: int = 14) -> list[dict[str, Any]]:
    """Images of several sizes with boxes: in a folder with COCO's file, and as rows. Some have none, or only a group; some boxes reach over the border."""
    draws, described, rows = np.random.default_rng(0), dict[str, list[Any]](images=[], annotations=[], categories=[]), list[dict[str, Any]]()
    described["categories"] = [{"id": 5 + number, "name": name} for number, name in enumerate(("platelet", "red", "white"))]
    (root / "images").mkdir(parents=True)
    for number in range(count):
        width, height = draws.integers(8, 40, 2).tolist()
        stored = io.BytesIO()
        Image.fromarray(draws.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(stored, "PNG")
        (root / "images" / f"{number:02}.png").write_bytes(stored.getvalue())
        described["images"].append({"id": number, "file_name": f"{number:02}.png", "width": width, "height": height})
        objects = list[dict[str, Any]]()
        for _ in range(number % 4):
            x, y = (draws.uniform(0, (width, height)) / 2).round(1).tolist()
            box = [x, y, width - x + 0.5, height / 2]
            objects.append(
                {"bbox": box, "category": ("platelet", "red", "white")[int(draws.integers(3))], "area": 7.5 + number, "iscrowd": int(number % 4 == 1)}
            )
            place = {"id": len(described["annotations"]), "image_id": number, "category_id": 5 + ["platelet", "red", "white"].index(objects[-1]["category"])}
            described["annotations"].append({**objects[-1], **place})
        rows.append({"__key__": f"{number:02}", "image": stored.getvalue(), "objects": objects})
    (root / "boxes.json").write_text(json.dumps(described))
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_boxes_in_shards_are_those_of_cocos_files(tmp_path: Path, kind: str, training: bool) -> None:
    rows = cells(tmp_path / "files")
    files = COCO(root=str(tmp_path / "files"), images="images", annotations="boxes.json", category_ids="dense", training=training)
    if kind == "tar":
        rows = [{"__key__": row["__key__"], "png": row["image"], "json": {"objects": row["objects"]}} for row in rows]
    elif kind != "mds":
        # As in Hugging Face's files: lists side by side, and numbers of the classes
        names = ("bbox", "category", "area", "iscrowd")
        rows = [row | {"objects": {x: [y[x] for y in row["objects"]] for x in names}} for row in rows]
        for row in rows:
            row["objects"]["category"] = [["platelet", "red", "white"].index(x) for x in row["objects"]["category"]]
    write(tmp_path / "shards" / "train", rows, kind, size=5)
    classes = ["platelet", "red", "white"] if kind != "mds" else None
    shards = ShardBoxes(root=str(tmp_path / "shards"), split="train", classes=classes, num_classes=4, training=training, shares={}, window=2)
    require_same(files, shards)
    assert shards.classes == files.classes
    assert torch.equal(shards.aspect_ratios(), files.aspect_ratios())
    assert sum(shards.shard_sizes) == len(shards) == (6 if training else 14)
    require_same(files, pickle.loads(pickle.dumps(shards)))
    assert shards.fingerprint() != ShardBoxes(root=str(tmp_path / "shards"), split="test", classes=["platelet", "red", "white"], shares={}).fingerprint()


def test_images_that_exif_would_turn_are_known_from_the_index(tmp_path: Path) -> None:
    rows, exif, stored = cells(tmp_path / "files"), Image.Exif(), io.BytesIO()
    exif[0x0112] = 3
    Image.new("RGB", (40, 40)).save(stored, "JPEG", exif=exif)
    root = write(tmp_path / "shards", [rows[0], rows[3] | {"image": stored.getvalue()}], "parquet")
    assert ShardBoxes(root=str(root), split="train", shares={}).turned == ["0000.parquet, sample 1"]


def test_a_hash_splits_images_with_boxes(tmp_path: Path) -> None:
    root = write(tmp_path / "shards", cells(tmp_path / "files"), "mds")
    parts = [ShardBoxes(root=str(root), split=split, shares=SHARES) for split in ("train", "valid")]  # type: ignore[arg-type]
    assert sorted(sample["image_id"] for part in parts for sample in part) == [*range(14)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objects": [{"bbox": [1, 2, 3]}]}, r"sample 0: has no list of objects; hint: dataset\.objects=NAME names"),
        ({"objects": [{"bbox": [1, 2, 3, 4]}]}, r"sample 0: has no list of objects(.|\n)*and category"),
        ({"objects": {"boxes": [[1, 2, 3, 4]]}}, r"sample 0: has no list of objects"),
        ({"objects": [{"bbox": [900, 2, 3, 4], "category": 1}]}, r"0000\.mds, sample 0, annotations\[0\]: a box extends beyond the image"),
        ({"image": b"text"}, r"sample 0: has no image; hint: dataset\.image=NAME"),
        ({"objects": [{"bbox": [1, 2, 3, 4], "category": "mouse"}]}, r"belongs to an unknown class(.|\n)*mouse"),
    ],
)
def test_impossible_boxes_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = cells(tmp_path / "files")
    root = write(tmp_path / "shards", [{**rows[0], **change}, *rows[1:]], "mds")
    with pytest.raises(DataError, match=message):
        ShardBoxes(root=str(root), split="train", shares={}, classes=["platelet", "red", "white"])


TEXTS = [("to be\r\n", "yes"), ("or", "no"), ("not to be \u00e9", "yes"), ("that is", "no"), ("the question", "yes")] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_texts_in_shards_are_those_of_files(tmp_path: Path, kind: str) -> None:
    names = ("txt", "cls") if kind == "tar" else ("text", "label")
    rows = [{"__key__": f"{number:02}", names[0]: text, names[1]: label} for number, (text, label) in enumerate(TEXTS)]
    root = write(tmp_path / "shards", rows, kind, size=4)
    (tmp_path / "table.jsonl").write_text("".join(json.dumps({"text": text.replace("\r", ""), "label": label}) + "\n" for text, label in TEXTS))
    files = TextTable(file=str(tmp_path / "table.jsonl"), train_file=str(tmp_path / "table.jsonl"), length=9)
    shards = ShardTexts(root=str(root), split="train", length=9)
    require_same(files, shards)
    assert shards.classes == files.classes == ["no", "yes"]
    for number, (text, _) in enumerate(TEXTS):
        (tmp_path / f"{number:02}.txt").write_text(text, newline="")
    documents = ShardDocuments(root=str(root), split="train", length=7)
    require_same(TextFiles(path=str(tmp_path), split="train", held_out=0, length=7), documents)
    parts = [ShardDocuments(root=str(root), split=split, shares=SHARES, length=1, separator="") for split in ("train", "valid")]  # type: ignore[arg-type]
    assert sum(len(part) + 1 for part in parts) == sum(len(text.replace("\r", "").encode()) for text, _ in TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_transcripts_in_shards_are_those_of_a_manifest(tmp_path: Path, kind: str) -> None:
    draws, rows, lines = np.random.default_rng(0), list[dict[str, Any]](), list[str]()
    for number, text in enumerate(("One two", "three", "four", "one two")):
        place = tmp_path / f"{number}.wav"
        soundfile.write(place, draws.uniform(-0.5, 0.5, 300 + 90 * number), 8000)
        lines.append(json.dumps({"audio": place.name, "text": text}) + "\n")
        names = ("wav", "txt") if kind == "tar" else ("audio", "text")
        rows.append({"__key__": place.stem if kind == "tar" else place.name, names[0]: place.read_bytes(), names[1]: text})
    (tmp_path / "list.jsonl").write_text("".join(lines))
    root = write(tmp_path / "shards", rows, kind, size=3)
    text = "txt" if kind == "tar" else "text"
    shards = ShardUtterances(root=str(root), split="train", sample_rate=4000, text=text)
    files = Manifest(file=str(tmp_path / "list.jsonl"), sample_rate=4000)
    # The name is the key of a row, or a position
    for place in range(4):
        expected, sample = files[place], shards[place]
        assert torch.equal(expected.pop("waveform"), sample.pop("waveform"))
        assert expected["transcript"] == sample["transcript"]
    with pytest.raises(DataError, match=r"the transcript has an unknown letter"):
        ShardUtterances(root=str(root), split="train", shares={}, text=text, letters="abc")


def test_data_index_notes_objects_and_transcripts_before_a_training(tmp_path: Path, samewise: Any) -> None:
    root = write(tmp_path / "shards", cells(tmp_path / "files"), "mds")
    samewise("data", "index", root, "--label", "objects", "--image", "image", code=0)
    samewise("data", "index", root, "--label=", code=0)
    assert sorted(x.name for x in (root / ".samewise").glob("*.shards")) == [",.shards", "objects,image.shards"]
    state = (root / ".samewise" / "objects,image.shards").stat().st_mtime_ns
    ShardBoxes(root=str(root), split="train", shares={})
    assert (root / ".samewise" / "objects,image.shards").stat().st_mtime_ns == state
    (root / "0000.mds").write_bytes((root / "0000.mds").read_bytes().replace(b'"iscrowd": 1', b'"iscrowd": 0', 1))
    with pytest.raises(DataError, match=rf"`samewise data index {root} --label=objects --image=image`"):
        ShardBoxes(root=str(root), split="train", shares={})
