"""What a batch contains depends on its key alone; errors and samples that do not repeat are named."""

import random
import re

import numpy as np
import pytest
import torch
from samewise_runner_noisy import Batches, Noisy
from torch.utils.data import default_collate

from samewise.runner.data import streams
from samewise.runner.data.keyed import Key, KeyedDataset
from samewise.runner.records.digest import value_digest

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
