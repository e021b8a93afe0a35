"""Only the generators that samples draw from are seeded for each sample, and every batch is the same as with all of them seeded."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from random import getstate
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import get_state
from torch import initial_seed

from samewise.runner.data import streams
from samewise.runner.data.generator_tracker import draws
from samewise.runner.data.keyed import Failure, Key, KeyedDataset
from samewise.runner.records.digest import value_digest

KEYS = [Key(epoch, start, tuple(range(start + 3, start + 7))) for epoch in range(2) for start in range(0, 20, 4)]


def draw_in_fork() -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


def draw_and_restore() -> float:
    with streams.preserve_generators():
        return random.random() + float(np.random.rand())


def drawn_by(generator: torch.Generator) -> float:
    return torch.rand((), generator=generator).item()


def bits_of_numpy() -> int:
    return np.random.get_bit_generator().state["state"]["key"][0]


def seeded_numpy() -> float:
    np.random.seed(3)
    return float(np.random.rand())


SAMPLES: dict[str, tuple[Callable[[int], float], int]] = {
    "nothing": (lambda index: 0.0, 0),
    "random": (lambda index: random.random(), 1),
    "a normal number of random": (lambda index: random.gauss(), 1),
    "numpy": (lambda index: float(np.random.rand()), 1),
    "normal numbers of numpy": (lambda index: float(np.random.randn()), 1),
    "torch": (lambda index: torch.rand(()).item(), 1),
    "normal numbers of torch": (lambda index: torch.randn(()).item(), 1),
    "all": (lambda index: random.random() + float(np.random.rand()) + torch.rand(()).item(), 3),
    "random, then torch too": (lambda index: random.random() + (torch.rand(()).item() if index > 12 else 0.0), 2),
    "at last numpy": (lambda index: float(np.random.rand()) if index == 22 else 0.0, 1),
    "at last each": (lambda index: (random.random, np.random.rand, lambda: torch.rand(()).item())[index % 3]() if index > 18 else 0.0, 3),
    "the seed alone is read": (lambda index: float(torch.initial_seed()), 1),
    "the seed is read of the generator itself": (lambda index: float(torch.default_generator.initial_seed()), 1),
    "a state alone is read": (lambda index: float(np.random.get_state()[1][0]), 1),  # pyright: ignore
    "a draw in a fork": (lambda index: draw_in_fork(), 1),
    "draws that are undone": (lambda index: draw_and_restore(), 3),
    "at last the seed alone is read": (lambda index: float(torch.initial_seed()) if index == 22 else 0.0, 1),
    "at last a generator is seeded from it": (lambda index: float(np.random.default_rng(initial_seed() % 2**32).random()) if index % 5 == 1 else 0.0, 1),
    "at last the seed is read in torch.random": (lambda index: float(torch.random.default_generator.initial_seed()) if index == 22 else 0.0, 1),
    "at last a state of torch is read": (lambda index: float(torch.get_rng_state()[:8].view(torch.int64)) if index == 22 else 0.0, 1),
    "at last a state of random is read": (lambda index: float(random.getstate()[1][3]) if index == 22 else 0.0, 1),
    "at last a state of numpy is read": (lambda index: float(np.random.get_state()[1][0]) if index == 22 else 0.0, 1),  # pyright: ignore
    "at last torch's generator gives its state": (lambda index: float(torch.default_generator.get_state()[8:9]) if index == 22 else 0.0, 1),
    "at last torch's generator is copied": (lambda index: drawn_by(torch.default_generator.clone_state()) if index == 22 else 0.0, 1),
    "at last torch's generator is drawn from": (lambda index: drawn_by(torch.default_generator) if index == 22 else 0.0, 4),
    "at last a state of random is read by its own name": (lambda index: float(getstate()[1][3]) if index == 22 else 0.0, 1),
    "at last a generator of random is copied": (lambda index: copy.deepcopy(random._inst).random() if index == 22 else 0.0, 1),  # pyright: ignore
    "at last a state of numpy is read by its own name": (lambda index: float(get_state()[1][0]) if index == 22 else 0.0, 1),  # pyright: ignore
    "at last a generator of numpy is copied": (lambda index: float(copy.deepcopy(np.random.mtrand._rand).random()) if index == 22 else 0.0, 1),  # pyright: ignore
    "at last the bits of numpy give their state": (lambda index: float(bits_of_numpy()) if index == 22 else 0.0, 1),
    "at last numpy is seeded": (lambda index: seeded_numpy() if index == 22 else 0.0, 1),
    "at last a draw in a fork": (lambda index: draw_in_fork() if index == 22 else 0.0, 1),
    "at last draws that are undone": (lambda index: draw_and_restore() if index == 22 else 0.0, 3),
}
"""What a sample draws, and how many generators are seeded for it in the end."""


class Drawing:
    def __init__(self, sample: Callable[[int], float]) -> None:
        self._sample = sample

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self._sample(index)], dtype=torch.float64)


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the generators that are seeded, one by one."""
    seen = list[str]()

    def noting(name: str, seeder: Callable[[int], object]) -> Callable[[int], object]:
        return lambda number: (seen.append(name), seeder(number))

    for name, seeder in list(streams.SEEDERS.items()):
        monkeypatch.setitem(streams.SEEDERS, name, noting(name, seeder))
    return seen


def batch_digests(keyed: KeyedDataset) -> list[int]:
    """The digest of each batch, with the generators in the state that a training step left."""
    found = []
    for number, key in enumerate(KEYS):
        streams.enter(number, "step")
        found.append(value_digest(keyed[key]))
    return found


@pytest.mark.parametrize("case", SAMPLES)
def test_a_batch_is_as_if_every_generator_were_seeded_for_each_sample(case: str, seeded: list[str]):
    sample, wanted = SAMPLES[case]
    dataset = Drawing(sample)
    expected = []
    for key in KEYS:
        samples = []
        for offset, index in enumerate(key.indices):
            streams.enter(7, "sample", key.epoch, key.start + offset, index)
            samples.append(dataset[index])
        expected.append(value_digest(torch.stack(samples)))
    keyed = KeyedDataset(dataset, torch.stack, seed=7, stream="sample")
    assert batch_digests(keyed) == expected
    seeded.clear()
    assert value_digest(keyed[KEYS[0]]) == expected[0]
    four_times = [name for name in streams.SEEDERS if seeded.count(name) >= len(KEYS[0].indices)]
    assert len(four_times) == wanted


def test_a_collate_function_may_draw_random_numbers():
    def shuffled(samples: Any) -> torch.Tensor:
        return torch.stack(samples)[torch.randperm(len(samples))]

    keyed = KeyedDataset(Drawing(lambda index: 0.0), shuffled, seed=7, stream="sample")
    found = []
    for key in KEYS:
        streams.enter(7, "sample", key.epoch, key.start + 3, key.indices[-1])
        found.append(value_digest(shuffled([torch.tensor([index, 0.0], dtype=torch.float64) for index in key.indices])))
    assert batch_digests(keyed) == found


def test_a_transform_may_give_the_generator_to_an_operator():
    assert draws(lambda: drawn_by(torch.default_generator))


def test_what_gives_a_seed_is_as_it_was_once_a_batch_is_made():
    def now() -> list[Any]:
        return [type(random._inst), np.random.get_bit_generator(), torch.default_generator, torch.random.default_generator]

    before = now()
    keyed = KeyedDataset(Drawing(lambda index: 1 / (index - 12)), torch.stack, seed=7, stream="sample")
    assert [type(keyed[key]) for key in KEYS[1:4]] == [torch.Tensor, Failure, torch.Tensor]
    assert all(one is other for one, other in zip(now(), before, strict=True))
