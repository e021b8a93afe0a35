"""What a batch contains depends on its key alone, however many workers load it; errors, samples that do not repeat, and killed workers are named."""

import contextlib
import multiprocessing
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from samewise.recipes.detection import Detection
from samewise.runner.config import schema
from samewise.runner.data import streams
from samewise.runner.data.keyed import Key, KeyedDataset
from samewise.runner.data.loading import Loader
from samewise.runner.errors import DataError, Problem
from samewise.runner.records.digest import value_digest
from samewise.runner.training.failures import killed_worker

KEYS = [Key(epoch, start, tuple(range(start, start + 8))) for epoch in range(2) for start in range(0, 48, 8)]


def digests(*keys: Key, seed: int = 0) -> list[int]:
    keyed = KeyedDataset(Noisy(), default_collate, seed=seed, stream="sample")
    return [value_digest(keyed[key]) for key in keys]


def test_a_sample_does_not_depend_on_what_was_loaded_before():
    assert digests(KEYS[1]) == digests(*KEYS)[1:2]


def test_another_seed_or_epoch_gives_other_randomness():
    assert not set(digests(*KEYS[:6])) & set(digests(*KEYS[6:]))
    assert not set(digests(*KEYS)) & set(digests(*KEYS, seed=1))


def test_a_batch_that_a_data_set_makes_itself_is_keyed_by_its_first_sample():
    keyed = KeyedDataset(Batches(), default_collate, seed=3, stream="sample")
    keyed.must_repeat = True
    keys = [Key(1, start, (start + 2, start + 1)) for start in range(0, 20, 2)]
    found = [value_digest(keyed[key]) for key in keys]
    assert [value_digest(keyed[key]) for key in reversed(keys)] == found[::-1]
    streams.enter(3, "sample", 1, 4, 6)
    assert value_digest(Batches().batch(keys[2].indices)) == found[2]


def test_only_a_method_batch_that_takes_indices_makes_batches():
    class Attribute(Noisy):
        batch = 16

    class Failing(Noisy):
        def batch(self, indices):
            return {"value": self.missing[list(indices)]}

    assert len(KeyedDataset(Attribute(), default_collate, seed=0, stream="sample")[Key(0, 0, (1, 2))]["value"]) == 2
    (problem,) = KeyedDataset(Failing(), default_collate, seed=0, stream="sample")[Key(0, 0, (1, 2))].problems
    assert re.match(r"Failing fails in batch\(indices\), for samples 1, 2: AttributeError: .*'missing'", problem.message)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ([2, 2, None, 2], "fails at sample 12: "),
        ([2, 2, 3, 2], "fails at sample 12 beside sample 10: "),
        ([3, 2, 2, 2], "fails over samples 10, 11, 12, 13: "),
        ([2, 2, "no", 2], "fails at sample 12: TypeError: default_collate: batch must contain tensors"),
        (["no", 2, 2, 2], "fails at sample 10: TypeError: default_collate: batch must contain tensors"),
        (["no", "no", "no", "no"], "fails over samples 10, 11, 12, 13: "),
    ],
)
def test_an_error_names_its_sample_or_the_samples_that_do_not_fit_together(sizes, named):
    class Sized:
        def __getitem__(self, index):
            return None if sizes[index - 10] == "no" else torch.zeros(sizes[index - 10])

    failure = KeyedDataset(Sized(), default_collate, seed=0, stream="sample")[Key(0, 0, (10, 11, 12, 13))]
    assert named in str(failure.problems[0])


class OwnGenerator:
    """Samples that depend on more than their index and the seeded generators, each in its own way."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rng, self.kept, self.last, self.made = kind, np.random.default_rng(0), dict[int, float](), 0.0, list[int]()

    def __getitem__(self, index: int) -> dict[str, float]:
        self.made.append(index)
        return {"index": index, "value": getattr(self, self.kind)(index)}

    def own(self, index: int) -> float:
        return self.rng.random()

    def unseeded(self, index: int) -> float:
        return np.random.default_rng().random() if index == 13 else 0.0

    def cached(self, index: int) -> float:
        return self.kept[index] if index in self.kept else self.kept.setdefault(index, torch.rand(()).item())

    def neighbour(self, index: int) -> float:
        before, self.last = self.last, float(index)
        return before if index == 13 else 0.0

    def once(self, index: int) -> float:
        if len(self.made) == 13:
            raise OSError("the network is gone")
        return 0.0

    def slow(self, index: int) -> float:
        return 0.0

    def default(self, index: int) -> float:
        return torch.rand((), generator=torch.random.default_generator).item()

    def sound(self, index: int) -> float:
        if not self.kept:
            self.kept[-1] = random.random()  # prepared once, and without effect
        return torch.rand(()).item() + index


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("own", "sample 10, value differs"),
        ("unseeded", "sample 13, value differs"),
        ("cached", "sample 11, in the random numbers that it draws, differs"),
        ("neighbour", "sample 13, value differs"),
        ("once", "fails at sample 13: OSError: the network is gone"),
        ("slow", None),
        ("default", None),
        ("sound", None),
    ],
)
def test_the_first_samples_are_made_again_and_must_be_the_same(kind, named, monkeypatch):
    monkeypatch.setattr("samewise.runner.data.keyed._REPEATING_S", 0.0 if kind == "slow" else 1000.0)
    dataset = OwnGenerator(kind)
    keyed = KeyedDataset(dataset, default_collate, seed=0, stream="sample", name="dataset.train")
    keyed.must_repeat = True
    batch = keyed[Key(0, 0, tuple(range(10, 30)))]
    assert [named in problem.message for problem in batch.problems] == [True] if named else isinstance(batch, dict), batch
    made, those = {"slow": 2, "once": 13}.get(kind, 16), range(10, 11 if kind == "slow" else 18)
    assert dataset.made[:made] == [*those, *reversed(those)][:made]
    dataset.made.clear()
    keyed[Key(0, 20, (40, 41))]
    assert dataset.made == [40, 41] or named


def draw_in_fork() -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


DRAWS = {
    "random": random.random,
    "numpy": np.random.rand,
    "numpy, a normal number of which it keeps the second": np.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "torch's seed": lambda: float(np.random.default_rng(torch.initial_seed() % 2**32).random()),
    "torch, in a fork": draw_in_fork,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_each_sample_and_then_the_collate_function_draws_from_the_samples_own_stream(draw):
    class Drawing:
        def __getitem__(self, index: int) -> float:
            return float(draw())

    key = KEYS[1]
    batch = KeyedDataset(Drawing(), lambda samples: torch.tensor([*samples, draw()]), seed=7, stream="sample")[key]
    for offset, index in enumerate(key.indices):
        streams.enter(7, "sample", key.epoch, key.start + offset, index)
        assert batch[offset].item() == np.float32(draw())
    assert batch[-1].item() == np.float32(draw())


class Noisy:
    """Draws from all three generators for each sample, as careless data sets do."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 63:
            raise DataError(Problem("sample 63", "is broken"))
        return {"value": torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item(), torch.get_num_threads()], dtype=torch.float64)}


class Batches(Noisy):
    """Makes whole batches, with noise."""

    def batch(self, indices):
        return {"value": torch.tensor(indices) + torch.rand(len(indices)) + random.random() + np.random.rand()}


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_a_stream_gives_the_same_numbers_whenever_it_is_entered():
    streams.enter(7, "sample", 3, 14)
    first = draw()
    draw()
    streams.enter(7, "sample", 3, 14)
    assert draw() == first


@pytest.mark.parametrize("other", [(8, "sample", 3, 14), (7, "step", 3, 14), (7, "sample", 14, 3), (7, "sample", 3), (7, "sample", 3, 14, 0)])
def test_another_key_gives_another_stream_for_each_generator(other):
    streams.enter(7, "sample", 3, 14)
    first = draw()
    streams.enter(*other)
    assert all(one != two for one, two in zip(first, draw(), strict=True))


def test_a_scope_leaves_the_generators_as_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with contextlib.suppress(ZeroDivisionError), streams.scope(5, "init"):
        draw()
        raise ZeroDivisionError
    assert draw() == expected


def test_keys_are_the_same_on_every_machine():
    assert streams.key(0, "init") == 2879138877524531326
    assert streams.key(-3, "sample", 1, 2**40) == 7601186314624158506


def test_a_separate_generator_does_not_touch_the_global_one():
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    torch.randperm(10, generator=streams.generator(0, "order", 0))
    assert torch.rand(()) == expected


@pytest.mark.parametrize("number", range(8))
def test_each_generator_is_seeded_with_as_much_of_the_key_as_it_takes(number):
    key = streams.key(7, "sample", number)
    streams.enter(7, "sample", number)
    expected = random.Random(key).random(), np.random.RandomState(key % 2**32).rand(), torch.rand((), generator=torch.Generator().manual_seed(key)).item()
    assert draw() == expected
    assert torch.equal(torch.rand(3, generator=streams.generator(7, "sample", number)), torch.rand(3, generator=torch.Generator().manual_seed(key)))


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
