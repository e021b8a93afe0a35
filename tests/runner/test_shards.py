"""A training from shards has the trace of one from files, also when it is killed and finished elsewhere."""

import json
import random
import shutil
import signal
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from samewise_datasets_shard_files import Rows, rows_of, write
from samewise_forked import Forked
from samewise_runner_jobs import Job, assert_same, run
from samewise_runner_launched import wait_for_step
from samewise_tiny import DIGITS, work_in_project

from samewise.datasets.digits import Digits
from samewise.runner.data.dataset import ByShard
from samewise.runner.data.order import shuffled

SHAPE = ["dataset.channels=1", "dataset.mode=gray", "dataset.image_size=8", "dataset.mean=[0.5]", "dataset.std=[0.5]"]
TRAIN = ["train", *DIGITS, "model.width=8", "transforms=images", "batch_size=24", "checkpoint.every_steps=2", *SHAPE]


KINDS = ("tar", "parquet", "mds")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as PNG in folders by class, and in the same order in shards of 20."""
    root = tmp_path_factory.mktemp("digits")
    for split, count in (("train", 130), ("valid", 30)):
        data = Digits(split=split)
        samples = list[tuple[str, str, bytes]]()
        for label, name, image in sorted((str(data[place]["label"]), f"{place:04}", data[place]["image"]) for place in range(count)):
            place = root / "files" / split / label / f"{name}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy().astype(np.uint8)).save(place)
            samples.append((f"{label}/{name}.png", label, place.read_bytes()))
        for kind in KINDS:
            write(root / kind / split, rows_of(samples, kind), kind, size=20)
    return root


def trace(run_root: Path) -> bytes:
    (path,) = run_root.glob("*/*/trace.jsonl")
    return path.read_bytes().partition(b"\n")[2]


def test_the_trace_from_shards_is_that_from_files(digits: Path, tmp_path: Path, samewise: Callable[..., Any]) -> None:
    """With order=bijection, which needs only the number of samples, since the shards have them in the order of the files."""
    for kind in ("files", *KINDS):
        dataset = "image_folder" if kind == "files" else "shards"
        done = samewise(*TRAIN, f"dataset={dataset}", f"dataset.root={digits / kind}", "order=bijection", "max_steps=7", f"run_root={tmp_path / kind}")
        assert done.returncode == 0, done.stderr
    assert {trace(tmp_path / kind) for kind in KINDS} == {trace(tmp_path / "files")}


@pytest.mark.slow
def test_a_run_killed_on_two_ranks_with_three_workers_is_finished_on_one_without(digits: Path, tmp_path: Path, samewise: Callable[..., Any]) -> None:
    common = [*TRAIN, "dataset=shards", f"dataset.root={digits / 'tar'}", "dataset.window=3", "max_steps=24", "replicas=2", "strategy=elastic"]
    killed = tmp_path / "killed"
    process = Forked(*common, f"run_root={killed}", "strategy.nproc=2", "loader.num_workers=3", said=tmp_path / "said")
    wait_for_step(process, killed, 5)
    process.kill()
    (begun,) = killed.glob("*/*/trace.jsonl")
    assert begun.read_bytes().count(b"\n") < 24
    for root in (killed, tmp_path / "whole"):
        assert samewise(*common, f"run_root={root}", "loader.num_workers=0").returncode == 0
    assert trace(killed) == trace(tmp_path / "whole")


NOTES = """
from samewise.runner.data.keyed import KeyedDataset

make, notes = KeyedDataset._make, os.open({path!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def noted(self, key):
    if self._stream == "sample":
        os.write(notes, (" ".join(map(str, (key.epoch, key.start, *key.indices))) + chr(10)).encode())
    return make(self, key)

KeyedDataset._make = noted
"""
"""Writes where each sample stands that a process or a worker makes for training: epoch, first position, indices."""


def noted_samples(path: Path) -> dict[tuple[int, int], int]:
    """The sample at each epoch and position; made again, it must be the same."""
    samples = dict[tuple[int, int], int]()
    for line in path.read_text().splitlines():
        epoch, start, *indices = map(int, line.split())
        for position, index in enumerate(indices, start):
            assert samples.setdefault((epoch, position), index) == index
    return samples


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_a_mixture_killed_at_random_steps_on_any_ranks_and_workers_has_the_same_samples_and_bits(digits: Path, tmp_path: Path, kills: int) -> None:
    """Of tar and Parquet shards. Each start draws its number of ranks and of workers, the step of its end, and whether one rank is killed or all are."""
    steps, chance = 3 * kills + 6, random.Random(kills)
    more = f"{{_target_: samewise.datasets.shards.ShardImages, root: {digits / 'parquet'}, split: train, shares: {{}}, mode: gray, window: 2}}"
    sets = ["dataset=shards", f"dataset.root={digits / 'tar'}", "dataset.window=3", f"+dataset.train_more={more}", *SHAPE]
    common = [
        *sets,
        "order=mixed",
        "loader.order.weights={train: 2, train_more: [1, 4]}",
        "transforms=images",
        f"max_steps={steps}",
        "checkpoint.every_steps=1",
    ]
    alone, root, notes = tmp_path / "alone", tmp_path / "killed", [tmp_path / name for name in ("alone.txt", "killed.txt")]
    job = Job(alone, 1, *common, before=NOTES.format(path=str(notes[0])))
    assert job.wait() == [0], job.errors
    (whole,) = alone.glob("*/*/trace.jsonl")
    step = 0
    for _ in range(kills):
        ranks, workers = chance.choice([1, 2, 4]), chance.choice([0, 1, 3])
        job = Job(root, ranks, *common, f"loader.num_workers={workers}", before=NOTES.format(path=str(notes[1])))
        step = min(steps - 2, max(step, job.steps()) + chance.randrange(4))
        job.wait_for_step(step)
        time.sleep(chance.random() * 0.05)
        for rank in chance.choice([job.ranks, [chance.choice(job.ranks)]]):
            rank.kill()
        assert -signal.SIGKILL in job.wait(60)
        assert "Traceback" not in job.errors
    assert_same(run(root, 2, *common, before=NOTES.format(path=str(notes[1]))), whole.parent)
    samples, expected = map(noted_samples, reversed(notes))
    assert len([place for place in expected if place in samples]) == len(expected) == 16 * steps
    assert samples | expected == samples


STREAMS = """
import torch
from torch.utils.data import Dataset, IterableDataset

class Stream(IterableDataset):
    window = 2

    def __init__(self, *, sizes=(20, 13, 0, 31, 16), wrong=0):
        self.shard_sizes, self.wrong = sizes, wrong

    def read_shard(self, number):
        torch.rand(number)
        for place in range(self.shard_sizes[number] + self.wrong):
            yield torch.full((1, 8, 8), 40.0 * number + place), place % 10

    def __iter__(self):
        raise RuntimeError("needs no position")

class Mapped(Stream, Dataset):
    def __len__(self):
        return sum(self.shard_sizes)

    def __getitem__(self, index):
        return [sample for number in range(5) for sample in self.read_shard(number)][index]

class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1, 8, 8), 0

class Unsized(Endless):
    def read_shard(self, number):
        yield from self
"""
OF_STREAMS = ["train", *DIGITS, "model.width=8", "transforms=images", "batch_size=16", "max_steps=7"]


@pytest.fixture
def streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "num_classes: 10\nchannels: 1\nimage_size: 8\nmean: [0.5]\nstd: [0.5]\n" + "".join(f"{x}: {{_target_: lab.Mapped}}\n" for x in ("train", "valid"))
    work_in_project(tmp_path, monkeypatch, "lab", STREAMS, {"dataset/lab": config})


@pytest.mark.usefixtures("streams")
def test_a_stream_with_shards_has_the_trace_of_its_samples_read_by_index(tmp_path: Path, samewise: Callable[..., Any]) -> None:
    for name, further in (("Mapped", []), ("Stream", []), ("Stream", ["loader.num_workers=2"])):
        samewise(*OF_STREAMS, "dataset=lab", f"dataset.train._target_=lab.{name}", f"run_root={tmp_path / name}{len(further)}", *further, code=0)
    assert trace(tmp_path / "Stream0") == trace(tmp_path / "Stream1") == trace(tmp_path / "Mapped0")


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.train._target_=lab.Endless"], "a stream does as well if it has shard_sizes and read_shard(number): docs/shards.md has an example"),
        (["dataset.train._target_=lab.Unsized"], "has no attribute shard_sizes, the number of samples of each shard; hint: a data set must be map"),
        (["dataset.train._target_=lab.Stream", "+dataset.train.wrong=1"], "Stream.read_shard(0) has another number of samples than shard_sizes[0]"),
    ],
)
def test_a_stream_without_shards_of_known_length_is_refused(tmp_path: Path, samewise: Callable[..., Any], overrides: list[str], message: str) -> None:
    assert message in " ".join(samewise(*OF_STREAMS, "dataset=lab", *overrides, f"run_root={tmp_path / 'runs'}", code=2).stderr.split())


def pictures(root: Path, files: Path) -> dict[str, Rows]:
    rows = dict[str, Rows]()
    for split, source, count in (("train", "train", 12), ("valid", "test", 3)):
        samples = list[tuple[str, str, bytes]]()
        for file in sorted((root / "cifar10_images" / source).glob("*/*.jpg")):
            if int(file.stem) < count:
                place = files / split / file.parent.name / file.name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
                samples.append((f"{file.parent.name}/{file.name}", file.parent.name, file.read_bytes()))
        rows[split] = rows_of(samples, "mds")
    return rows


def takes(root: Path, files: Path) -> dict[str, Rows]:
    files.mkdir(parents=True)
    samples = {"train": list[tuple[str, str, bytes]](), "valid": list[tuple[str, str, bytes]]()}
    for file in sorted((root / "free_spoken_digits" / "recordings").glob("?_*_[0-6].wav")):
        shutil.copy(file, files / file.name)
        samples["valid" if int(file.stem[-1]) < 1 else "train"].append((file.name, file.name[0], file.read_bytes()))
    return {split: [{"__key__": name, "audio": raw, "label": label} for name, label, raw in listed] for split, listed in samples.items()}


def cells(root: Path, files: Path) -> dict[str, Rows]:
    folder, rows = root / "bccd" / "BCCD", dict[str, Rows]()
    names = ["Platelets", "RBC", "WBC"]
    for split, source in (("train", "train"), ("valid", "val")):
        described = dict[str, list[Any]](images=[], annotations=[], categories=[{"id": number, "name": name} for number, name in enumerate(names, 1)])
        listed = list[dict[str, Any]]()
        (files / split).mkdir(parents=True)
        for number, name in enumerate((folder / "ImageSets" / "Main" / f"{source}.txt").read_text().split()[:12]):
            shutil.copy(folder / "JPEGImages" / f"{name}.jpg", files / split)
            tree, objects = ElementTree.parse(folder / "Annotations" / f"{name}.xml"), list[dict[str, Any]]()
            for item in tree.iter("object"):
                x1, y1, x2, y2 = (float(item.findtext(f"bndbox/{x}", "")) for x in ("xmin", "ymin", "xmax", "ymax"))
                objects.append({"bbox": [x1, y1, x2 - x1, y2 - y1], "category": item.findtext("name", "")})
                category = {"id": len(described["annotations"]), "image_id": number, "category_id": names.index(objects[-1]["category"]) + 1}
                described["annotations"].append(objects[-1] | category)
            described["images"].append({"id": number, "file_name": f"{name}.jpg"} | {x: int(tree.findtext(f"size/{x}", "")) for x in ("width", "height")})
            listed.append({"__key__": name, "image": (files / split / f"{name}.jpg").read_bytes(), "objects": objects})
        (files / f"{split}.json").write_text(json.dumps(described))
        rows[split] = listed
    return rows


def members(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it is usual in tar files."""
    endings = {"image": "jpg", "audio": "wav", "label": "cls"}
    return {endings.get(x, x): y for x, y in row.items() if x in endings} | {
        "__key__": row["__key__"].partition(".")[0],
        **({"json": {"objects": row["objects"]}} if "objects" in row else {}),
    }


QUIET = ["debug=tiny", "tracking=none", "evaluate.pictures=false", "callbacks=none", "order=bijection", "max_steps=2"]
REAL: dict[str, tuple[Callable[[Path, Path], dict[str, Rows]], list[str], list[str], str]] = {
    "CIFAR-10": (
        pictures,
        ["experiment=resnet18_digits", "model.width=8", "transforms=images", "dataset.image_size=32", "dataset.num_classes=10"],
        ["dataset=image_folder"],
        "shards",
    ),
    "spoken digits": (
        takes,
        ["experiment=resnet18_own_recordings", "model.width=8", "dataset.sample_rate=8000", "dataset.num_classes=10"],
        ["dataset=labelled_recordings", "dataset.pattern='(?P<label>[0-9])_[a-z]+_((?P<valid>0)|[0-9]+)[.]wav'"],
        "shard_recordings",
    ),
    "blood cells": (
        cells,
        ["experiment=retinanet_own_images", "model.channels=32", "model.min_size=64", "model.max_size=96", "dataset.num_classes=4", "batch_size=4"],
        [
            *("dataset=coco", "dataset.category_ids=dense", "dataset.train_images=train", "dataset.valid_images=valid"),
            *("dataset.train_annotations=train.json", "dataset.valid_annotations=valid.json"),
        ],
        "shard_boxes",
    ),
}


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", REAL)
def test_the_trace_of_real_data_from_shards_is_that_from_files(data_root: Path, tmp_path: Path, samewise: Callable[..., Any], name: str) -> None:
    prepare, common, files, dataset = REAL[name]
    rows = prepare(data_root, tmp_path / "files")
    for kind in KINDS:
        for split, listed in rows.items():
            write(tmp_path / kind / split, [*map(members, listed)] if kind == "tar" else listed, kind, size=25)
    for kind in ("files", *KINDS):
        own = files if kind == "files" else [f"dataset={dataset}"]
        samewise("train", *common, *own, *QUIET, f"dataset.root={tmp_path / kind}", f"run_root={tmp_path / 'runs' / kind}", code=0)
    assert {trace(tmp_path / "runs" / kind) for kind in KINDS} == {trace(tmp_path / "runs" / "files")}


def test_each_shard_of_a_stream_is_read_once_in_an_epoch_and_a_window_of_them_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lab: dict[str, Any] = {}
    exec(STREAMS, lab)
    reads, data = list[int](), ByShard(lab["Stream"]())
    monkeypatch.setattr(
        lab["Stream"], "read_shard", lambda self, number: (reads.append(number), range(100 * number, 100 * number + self.shard_sizes[number]))[1]
    )
    for epoch in range(2):
        reads.clear()
        samples = [data[index] for index in shuffled(data, seed=0).indices(epoch).tolist()]
        assert sorted(samples) == [100 * number + place for number, size in enumerate(data.shard_sizes) for place in range(size)]
        assert len(reads) == len(set(reads)) <= 4, "some are still in memory"
