"""A training from shards has the trace of one from files, also when it is killed and finished elsewhere."""

import io
import random
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from samewise_forked import Forked
from samewise_runner_jobs import Job, assert_same, run
from samewise_runner_launched import wait_for_step
from samewise_tiny import DIGITS, work_in_project

from samewise.datasets.digits import Digits

SHAPE = ["dataset.channels=1", "dataset.mode=gray", "dataset.image_size=8", "dataset.mean=[0.5]", "dataset.std=[0.5]"]
TRAIN = ["train", *DIGITS, "model.width=8", "transforms=images", "batch_size=24", "checkpoint.every_steps=2", *SHAPE]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as PNG in folders by class, and in the same order in shards of 20: tar, and Parquet with groups of 7."""
    root = tmp_path_factory.mktemp("digits")
    for split, count in (("train", 130), ("valid", 30)):
        data = Digits(split=split)
        samples = sorted((str(data[place]["label"]), f"{place:04}", data[place]["image"]) for place in range(count))
        for start in range(0, count, 20):
            rows = list[dict[str, Any]]()
            for label, name, image in samples[start : start + 20]:
                stored = io.BytesIO()
                Image.fromarray(image[0].numpy().astype(np.uint8)).save(stored, "PNG")
                place = root / "files" / split / label / f"{name}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(stored.getvalue())
                rows.append({"image": {"bytes": stored.getvalue(), "path": None}, "label": int(label), "__key__": f"{label}/{name}"})
            for kind in ("tar", "parquet"):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.Table.from_pylist(rows), root / "parquet" / split / f"{start:04}.parquet", row_group_size=7)
            with tarfile.open(root / "tar" / split / f"{start:04}.tar", "w") as archive:
                for row in rows:
                    for ending, content in (("png", row["image"]["bytes"]), ("cls", str(row["label"]).encode())):
                        header = tarfile.TarInfo(f"{row['__key__']}.{ending}")
                        header.size = len(content)
                        archive.addfile(header, io.BytesIO(content))
    return root


def trace(run_root: Path) -> bytes:
    (path,) = run_root.glob("*/*/trace.jsonl")
    return path.read_bytes().partition(b"\n")[2]


def test_the_trace_from_shards_is_that_from_files(digits: Path, tmp_path: Path, samewise: Callable[..., Any]) -> None:
    """With order=bijection, which needs only the number of samples, since the shards have them in the order of the files."""
    for kind in ("files", "tar", "parquet"):
        dataset = "image_folder" if kind == "files" else "shards"
        done = samewise(*TRAIN, f"dataset={dataset}", f"dataset.root={digits / kind}", "order=bijection", "max_steps=7", f"run_root={tmp_path / kind}")
        assert done.returncode == 0, done.stderr
    assert trace(tmp_path / "tar") == trace(tmp_path / "parquet") == trace(tmp_path / "files")


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
        job.wait()
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
