"""Any number of workers gives the same batches; what happens to a worker that is stopped or killed."""

import multiprocessing
import subprocess
import sys
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
from samewise.runner.training.failures import killed_worker


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


FULL = """
import subprocess, torch
from samewise.runner.config import schema
from samewise.runner.data.keyed import Key, KeyedDataset
from samewise.runner.data.loading import Loader
from samewise.runner.errors import DataError

for size in ("16k", "1m"):
    subprocess.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)
    loader = Loader(KeyedDataset([torch.zeros(1 << 20)], torch.stack, seed=0, stream="sample"), lambda: iter([Key(0, 0, (0,))]), schema.Loader(num_workers=1))
    try:
        print(list(loader))
    except DataError as error:
        print(error)
"""


def test_full_shared_memory_is_named_for_the_locks_of_the_queues_and_for_a_batch() -> None:
    apart = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16k tmpfs /dev/shm && exec "$@"', "sh"]
    if sys.platform != "linux" or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root, and a sandbox that lets it")
    done = subprocess.run([*apart, sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == ["loader.num_workers: /dev/shm is full"] * 2
    assert done.stdout.count("--shm-size=8g), or set loader.num_workers=0") == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_sample_arrives_as_it_was_raised(num_workers):
    with pytest.raises(DataError) as caught:
        batches(num_workers, keys=[Key(0, 56, tuple(range(56, 64)))])
    assert str(caught.value) == "sample 63: is broken"
