"""Orders by weights, against torch's sampler and against counts of what they draw."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch.utils.data import WeightedRandomSampler

from samewise.runner.data import streams
from samewise.runner.data.dataset import Joined, fingerprint, sample_name
from samewise.runner.data.weighted import Mixed, Weighted
from samewise.runner.errors import ConfigError

LABELS = [0] * 90 + [1] * 9 + [2]


class Pairs(list[tuple[str, int]]):
    """Samples (text, label) without a list of labels, as of a user's data set."""

    classes = ("cat", "dog", "hen")
    rarity = (0.0, *range(1, 100))

    def path(self, index: int) -> str:
        return f"{self[index][0]}.wav"


def pairs(labels: list[int], text: str = "") -> Pairs:
    return Pairs([(f"{text}{number}", label) for number, label in enumerate(labels)])


WEIGHTS: dict[str, tuple[Any, list[float]]] = {
    "each class as often": ("balanced", [1 / Counter(LABELS)[label] for label in LABELS]),
    "some classes more often": ({"cat": 0, "dog": 2, "hen": 1}, [[0, 2, 1][label] / Counter(LABELS)[label] for label in LABELS]),
    "of the data set": ("rarity", [*map(float, range(100))]),
}


@pytest.mark.parametrize("case", WEIGHTS)
@pytest.mark.parametrize("kind", ["labels", "targets", "samples", "sets"])
def test_weighted_samples_are_those_of_torchs_weighted_random_sampler(case: str, kind: str) -> None:
    weights, expected = WEIGHTS[case]
    data: Any = pairs(LABELS)
    if kind == "sets" and case != "of the data set":
        data = Joined({"train": pairs(LABELS[:60]), "train_more": pairs(LABELS[60:])})
    elif kind != "samples":
        setattr(data, kind, LABELS)
    order = Weighted(data, seed=5, weights=weights, samples=40)
    generator = streams.generator(5, "order", 3)
    assert order.indices(3).tolist() == [*WeightedRandomSampler(expected, 40, generator=generator)]
    assert order.indices(3).tolist() != order.indices(4).tolist()
    drawn = Counter(LABELS[index] for index in Weighted(data, seed=0, weights=weights, samples=30_000).indices(0))
    shares = np.array([sum(w for w, label in zip(expected, LABELS, strict=True) if label == x) for x in range(3)]) / sum(expected)
    # Five standard deviations of a share of 1/2
    assert max(abs(drawn[x] / 30_000 - shares[x]) for x in range(3)) < 5 * 0.5 / 30_000**0.5


@settings(deadline=None, database=None, derandomize=True, max_examples=60)
@given(draw.lists(draw.tuples(draw.integers(1, 40), draw.floats(0.001, 10)), min_size=1, max_size=5), draw.integers(1, 90))
def test_sets_are_mixed_by_their_weights_and_each_repeats_only_when_used_up(sets: list[tuple[int, float]], samples: int) -> None:
    sizes, weights = zip(*sets, strict=True)
    names = [f"set{number}" for number in range(len(sets))]
    data = Joined(dict(zip(names, map(range, sizes), strict=True)))
    order = Mixed(data, seed=1, weights=dict(zip(names, weights, strict=True)), samples=samples)
    epochs = [order.indices(epoch).numpy() for epoch in range(12)]
    set_of = np.repeat(np.arange(len(sets)), sizes)
    shares = np.array(weights) / sum(weights) * samples
    drawn = np.array([np.bincount(set_of[indices], minlength=len(sets)) for indices in epochs])
    assert np.abs(drawn - shares).max() < 1 + 1e-9, "an epoch has each share, rounded"
    assert np.abs(drawn.sum(0) - 12 * shares).max() < 3, "roundings cancel over the epochs"
    assert {len(indices) for indices in epochs} == {samples}
    for stop in range(1, 13):
        times = np.bincount(np.concatenate(epochs[:stop]), minlength=len(data))
        assert all(np.ptp(times[set_of == number]) <= 1 for number in range(len(sets)))
    # A new process that starts anywhere finds the same
    other = Mixed(data, seed=1, weights=dict(zip(names, weights, strict=True)), samples=samples)
    positions = np.arange(samples)[::-3]
    assert np.array_equal(other.at(7, positions), epochs[7][positions])


def test_a_curriculum_is_an_order_with_counts_of_its_own() -> None:
    class Curriculum(Mixed):
        def counts(self, epoch: int) -> list[int]:
            return [10 - epoch, epoch]

    order = Curriculum(Joined({"easy": range(10), "hard": range(5)}), seed=0, weights={"easy": 1, "hard": 1}, samples=10)
    drawn = [order.indices(epoch).tolist() for epoch in range(6)]
    assert [sum(index >= 10 for index in indices) for indices in drawn] == [0, 1, 2, 3, 4, 5]
    assert {index for indices in drawn[:4] for index in indices if index >= 10} == {*range(10, 15)}


def test_joined_sets_have_the_names_files_and_contents_of_each() -> None:
    sets = {"train": pairs([0, 1], "a"), "train_more": pairs([2, 0, 1], "b")}
    joined = Joined(sets)
    assert (len(joined), joined[2], joined.classes) == (5, ("b0", 2), ["cat", "dog", "hen"])
    assert [sample_name(joined, index) for index in (1, 2, 4)] == ["sample 1 (a1.wav)", "sample 2 (b0.wav)", "sample 4 (b2.wav)"]
    others = [Joined(sets | {"train_more": pairs([2, 0], "b")}), Joined(sets | {"train_more": pairs([2, 0, 2], "b")})]
    assert len({fingerprint(x) for x in (joined, Joined(dict(sets)), *others)}) == 3


@pytest.mark.parametrize(
    ("kind", "weights", "message"),
    [
        (Weighted, "rarities", "the name of 100 numbers"),
        (Weighted, {"cat": 1, "dog": 1}, "a number for each of cat, dog, hen"),
        (Weighted, {"cat": -1, "dog": 1, "hen": 1}, "a number for each of cat, dog, hen"),
        (Mixed, {"train": 1}, "several training sets: dataset.train, dataset.train_NAME"),
    ],
)
def test_weights_that_do_not_fit_are_refused(kind: Any, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(pairs(LABELS), seed=0, weights=weights)
