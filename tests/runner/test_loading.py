"""Any number of workers gives the same batches; what happens to a worker that is stopped or killed."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from samewise_runner_noisy import Batches, Noisy
from torch.utils.data import default_collate

from samewise.recipes.detection import Detection
from samewise.runner.config import schema
from samewise.runner.data.keyed import Key, KeyedDataset
from samewise.runner.data.loading import Loader
from samewise.runner.errors import DataError
from samewise.runner.records.digest import value_digest
from samewise.runner.training.guards.step_errors import killed_worker


def batches(num_workers: int, *, keys=None, kind=Noisy) -> list[int]:
    wanted = keys or [Key(epoch, start, tuple(range(start, start + 8))) for epoch in range(2) for start in range(0, 48, 8)]
    loader = Loader(KeyedDataset(kind(), default_collate, seed=0, stream="sample"), lambda: iter(wanted), schema.Loader(num_workers=num_workers))
    return [value_digest(batch) for batch in loader]


@pytest.mark.parametrize("kind", [Noisy, Batches])
def test_any_number_of_workers_gives_the_same_batches(kind):
    alone = batches(0, kind=kind)
    assert len(set(alone)) == 12
    assert batches(1, kind=kind) == alone
    assert batches(3, kind=kind) == alone


class Stored:
    """Samples that are parts of one tensor, as are the batches that `Slices` makes itself."""

    def __init__(self):
        self.values = torch.arange(24.0).reshape(8, 3)

    def __getitem__(self, index):
        return {"x": self.values[index]}


class Slices(Stored):
    def batch(self, indices):
        return {"x": self.values[indices[0] : indices[-1] + 1]}


def in_lists(samples):
    return {"x": [sample["x"] for sample in samples]}


def of_detection(samples):
    targets = {"boxes": torch.tensor([[0.0, 0.0, 1.0, 1.0]]), "labels": torch.tensor([1])}
    images = [{"image": sample["x"].expand(3, 1 + number, 3), "mask": sample["x"], **targets} for number, sample in enumerate(samples)]  # of different sizes
    collated = Detection().collate(images)
    return {"x": [*collated["image"], *collated["mask"]]}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("kind", "collate"), [(Stored, in_lists), (Stored, of_detection), (Slices, default_collate)])
def test_who_changes_a_batch_in_place_does_not_change_the_data(kind, collate, num_workers):
    keyed = KeyedDataset(kind(), collate, seed=0, stream="sample")
    loader = Loader(keyed, lambda: iter([Key(epoch, 0, (1, 2, 3)) for epoch in range(6)]), schema.Loader(num_workers=num_workers))
    seen = set[int]()
    for batch in loader:
        seen.add(value_digest(batch))
        for x in batch["x"]:
            x.add_(1.0)
    assert len(seen) == 1


class OneFile:
    """Numbers in a file that is kept open, without a buffer; each with the position at which this process found the file."""

    def __init__(self, file):
        self.file, self.found_at = file, None

    def __getitem__(self, index):
        self.found_at = self.file.tell() if self.found_at is None else self.found_at
        self.file.seek(8 * index)
        return {"x": torch.tensor(int.from_bytes(self.file.read(8), "little")), "found at": self.found_at}


FILES = {
    "both": lambda path: path.open("r+b", buffering=0),
    "reading": lambda path: path.open("rb", buffering=0),
    "appending": lambda path: path.open("a+b", buffering=0),
    "temporary": lambda path: tempfile.TemporaryFile(buffering=0),  # noqa: SIM115
    "in memory": lambda path: os.fdopen(os.memfd_create("numbers"), "w+b", buffering=0),
}


@pytest.mark.parametrize("kind", FILES)
def test_each_worker_has_its_own_position_in_a_file_that_the_data_set_keeps_open(kind, tmp_path):
    numbers = torch.arange(200).numpy().tobytes()
    (tmp_path / "numbers").write_bytes(numbers)
    with FILES[kind](tmp_path / "numbers") as file:
        if not os.fstat(file.fileno()).st_size:
            file.write(numbers)
        file.seek(24)
        keys = [Key(0, start, (start, start + 1)) for start in range(100, 120, 2)]
        loader = Loader(KeyedDataset(OneFile(file), default_collate, seed=0, stream="sample"), lambda: iter(keys), schema.Loader(num_workers=2))
        found = [*loader]
        assert file.tell() == 24
    assert torch.cat([batch["x"] for batch in found]).tolist() == [*range(100, 120)]
    assert {*torch.cat([batch["found at"] for batch in found]).tolist()} == {24}


def test_a_worker_finishes_its_batches_after_sigterm():
    """The main process stops by itself when its step is done, and needs the worker's batches for that."""
    wanted = [Key(0, start, (start,)) for start in range(20)]
    others = multiprocessing.active_children()
    loader = iter(Loader(KeyedDataset(Noisy(), default_collate, seed=0, stream="sample"), lambda: iter(wanted), schema.Loader(num_workers=1)))
    found = [value_digest(next(loader))]
    (worker,) = (child for child in multiprocessing.active_children() if child not in others)
    worker.terminate()
    found += [value_digest(batch) for batch in loader]
    assert found == batches(0, keys=wanted)
    worker.join(20)
    assert worker.exitcode == 0


def with_a_worker() -> tuple[Loader, Iterator[Any], Any]:
    others = multiprocessing.active_children()
    keys = [Key(0, start, (start,)) for start in range(20)]
    loader = Loader(KeyedDataset(Noisy(), default_collate, seed=0, stream="sample"), lambda: iter(keys), schema.Loader(num_workers=1), persistent=True)
    batches = iter(loader)
    next(batches)
    (worker,) = (child for child in multiprocessing.active_children() if child not in others)
    return loader, batches, worker


def kill_and_continue(worker: Any, batches: Iterator[Any]) -> None:
    worker.kill()  # torch's handler may raise its error at once
    list(batches)


def test_a_killed_worker_is_named_with_the_likely_cause() -> None:
    _, batches, worker = with_a_worker()
    with pytest.raises(RuntimeError) as caught:
        kill_and_continue(worker, batches)
    problem = killed_worker(caught.value)
    assert problem is not None
    assert problem.path == "loader.num_workers"
    assert problem.message.startswith(f"worker process {worker.pid} ")
    assert problem.message.endswith("the kernel, or a user, ended it")
    assert killed_worker(RuntimeError("the model has a DataLoader worker")) is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_sample_arrives_as_it_was_raised(num_workers):
    with pytest.raises(DataError) as caught:
        batches(num_workers, keys=[Key(0, 56, tuple(range(56, 64)))])
    assert str(caught.value) == "sample 63: is broken"


@pytest.mark.parametrize("first", [0, 8])
def test_a_batch_that_a_worker_cannot_send_is_an_error_that_names_its_entry(first):
    def collate(samples):
        return {"x": torch.stack([sample["value"] for sample in samples]), "odd": [{}.keys()] if samples[0]["value"][0] >= first else 0}

    keys = [Key(0, start, tuple(range(start, start + 4))) for start in range(0, 16, 4)]
    loader = Loader(KeyedDataset(Noisy(), collate, seed=0, stream="sample"), lambda: iter(keys), schema.Loader(num_workers=2))
    with pytest.raises(DataError, match="'odd' in a batch is of type dict_keys, which cannot be sent by a loader's worker: TypeError: cannot pickle"):
        list(loader)
