"""Where each sample goes: the order of an epoch, and how it is cut into batches."""

import bisect
import runpy
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as draw
from torch.utils.data import WeightedRandomSampler

from samewise.runner.callbacks.throughput import Throughput
from samewise.runner.data import streams, weighted
from samewise.runner.data.aspect_ratio import GroupedByAspectRatio, groups_of
from samewise.runner.data.dataset import Joined, fingerprint, sample_name
from samewise.runner.data.keyed import training_keys
from samewise.runner.data.order import Bijection, ByReplica, Checked, InOrder, Interleaved, Order, RepeatedAugmentation, Shuffled, Windowed, shuffled
from samewise.runner.data.plan import Plan
from samewise.runner.data.weighted import Mixed, Repeated, Weighted
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Outcome


def positions(plan: Plan, step: int) -> list[range]:
    return [range(*plan.bounds(step, number)[1:]) for number in range(plan.micro_batches)]


def test_the_speed_counts_the_samples_of_a_partial_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, logged = Plan(samples=26, batch_size=16, micro_batches=1, drop_last=False), list[dict[str, float]]()
    monkeypatch.setattr("time.perf_counter", iter([0.0, 26.0, 42.0]).__next__)
    view, speed = SimpleNamespace(device="cpu", read_ahead=None, log=logged.append), Throughput(every_steps=2)
    speed.on_start(view)
    for step in range(4):
        speed.on_step(view, Outcome(step + 1, {}, 1.0, {}, 0, 0, plan.size(step)))
    assert logged == [{"speed/samples_per_s": 1.0, "speed/step_ms": 13000.0}, {"speed/samples_per_s": 26 / 16, "speed/step_ms": 8000.0}]


@settings(deadline=None, database=None, derandomize=True)
@given(draw.integers(1, 40), draw.integers(1, 5), draw.integers(1, 4), draw.booleans())
def test_a_plan_cuts_epochs_into_batches_and_batches_into_nearly_equal_parts(samples, micro_batches, each, drop_last):
    size = micro_batches * each
    batches = [range(start, min(start + size, samples)) for start in range(0, samples, size)]
    batches = [batch for batch in batches if len(batch) == size] if drop_last else batches
    if not batches:
        with pytest.raises(ConfigError, match="batch_size"):
            Plan(samples, size, micro_batches, drop_last)
        return
    plan = Plan(samples, size, micro_batches, drop_last)
    assert plan.steps_per_epoch == len(batches)
    for step in range(2 * len(batches)):
        parts = positions(plan, step)
        assert [plan.bounds(step, number)[0] for number in range(micro_batches)] == [step // len(batches)] * micro_batches
        assert [place for part in parts for place in part] == list(batches[step % len(batches)])
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert list(plan.with_samples(step)) == [number for number, part in enumerate(parts) if part]
        assert [plan.is_empty(step, number) for number in range(micro_batches)] == [not part for part in parts]
    assert plan.fills_all == all(part for step in range(len(batches)) for part in positions(plan, step))


def test_each_epoch_has_another_permutation_which_can_be_repeated():
    order = Shuffled(range(50), seed=3)
    assert sorted(order.indices(0).tolist()) == list(range(50))
    assert torch.equal(order.indices(4), order.indices(4))
    assert not torch.equal(order.indices(4), order.indices(5))
    assert not torch.equal(order.indices(4), Shuffled(range(50), seed=4).indices(4))


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 4096, 12_345])
def test_a_bijection_holds_each_sample_once_in_every_epoch(size: int) -> None:
    order = Bijection(range(size), seed=3)
    assert all(sorted(order.indices(epoch).tolist()) == list(range(size)) for epoch in range(3))
    assert size < 10 or not torch.equal(order.indices(0), order.indices(1))


def shards(sizes: list[int], window: int) -> Any:
    """A data set in shards, whose samples are their numbers."""
    length = sum(sizes)
    members = {"shard_sizes": sizes, "window": window, "__len__": lambda self: length, "__getitem__": lambda self, index: index}
    return type("Shards", (), members)()


def sharded(sizes: list[int], window: int) -> Windowed:
    return Windowed(shards(sizes, window), seed=3)


@pytest.mark.parametrize("window", [1, 2, 3, 16])
@pytest.mark.parametrize("sizes", [[1], [5, 0, 7], [3] * 9, [40, 1, 13, 2, 0, 25, 8]])
def test_samples_in_shards_come_once_in_every_epoch_from_a_window_of_shards_at_a_time(sizes: list[int], window: int) -> None:
    order, ends = sharded(sizes, window), np.cumsum(sizes)
    for epoch in range(3):
        indices = order.indices(epoch).numpy()
        assert sorted(indices.tolist()) == list(range(sum(sizes)))
        assert [order.at(epoch, np.array([place])).item() for place in range(len(indices))] == indices.tolist()
        shards = np.searchsorted(ends, indices, "right")
        # From the first to the last sample of a shard, at most the others of its window come
        for shard in set(shards.tolist()):
            (places,) = np.nonzero(shards == shard)
            assert len(set(shards[places[0] : places[-1] + 1].tolist())) <= window
    assert sum(sizes) < 10 or not np.array_equal(order.indices(0), order.indices(1))


@pytest.mark.parametrize("sets", [1, 3])
def test_a_billion_samples_in_shards_are_sought_without_memory(sets: int) -> None:
    """Also those of a mixture, of which one set is not in shards, and another comes many times."""
    order: Order = sharded([9_999, 10_001] * 50_000, 16)
    if sets == 3:
        data = Joined({"train": shards([9_999, 10_001] * 40_000, 16), "train_b": range(10**8), "train_c": shards([1000] * 1000, 4)})
        order = Repeated(data, seed=3, repeats={"train": 1, "train_b": 1.99, "train_c": 1})
    assert len(order) == 10**9
    order.at(0, np.arange(8))
    tracemalloc.start()
    indices = order.at(5, np.arange(999_900_000, 10**9))
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert len(set(indices.tolist())) == 100_000
    assert order.at(5, np.array([999_950_000])).item() == indices[50_000]


def mixture(sizes: Sequence[int]) -> Order:
    """Sets of these numbers of samples, every second one in shards of 1,000."""
    sets = [shards([1000] * (size // 1000), 16) if number % 2 else range(size) for number, size in enumerate(sizes)]
    return Interleaved(Joined({f"set{number}": data for number, data in enumerate(sets)}), seed=0)


@pytest.mark.parametrize("kind", ["bijection", "window", "mixture"])
def test_a_bijection_mixes_as_well_as_a_permutation(kind: str) -> None:
    """Also within a window of shards, and with another set. Chi-square of 30 epochs over 16 x 16 cells, of (position, index) and of neighbours, with 15 x 15
    degrees of freedom; less 15 for positions where two sets have fixed shares."""
    size, expected = 50_000, np.array([225 - 15 * (kind == "mixture"), 225])
    counts = np.zeros((2, 30))
    fixed, adjacent = 0, 0
    orders = {
        "bijection": lambda: Bijection(range(size), seed=0),
        "window": lambda: sharded([4_000] * 11 + [6_000], 16),
        "mixture": lambda: mixture([34_000, 16_000]),
    }
    order = orders[kind]()
    for epoch in range(30):
        indices = order.indices(epoch).numpy()
        for number, pair in enumerate(((np.arange(size), indices), (indices[:-1], indices[1:]))):
            cells = np.histogram2d(*pair, bins=16, range=((0, size), (0, size)))[0]
            counts[number, epoch] = ((cells - cells.mean()) ** 2 / cells.mean()).sum()
        fixed += int((indices == np.arange(size)).sum())
        adjacent += int((np.abs(np.diff(indices)) == 1).sum())
    # Five standard errors of a mean of 30, and five standard deviations of Poisson counts of mean 30 and 60
    assert np.abs(counts.mean(1) - expected).max() < 5 * (2 * 225 / 30) ** 0.5
    assert abs(fixed - 30) < 28
    assert abs(adjacent - 60) < 39


def test_large_data_sets_take_a_bijection_that_seeks_anywhere() -> None:
    order = shuffled(range(10**9), seed=0)
    assert isinstance(order, Bijection)
    assert isinstance(shuffled(range(10**7), seed=0), Shuffled)
    tracemalloc.start()
    indices = order.at(5, np.arange(999_900_000, 10**9))
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert len(set(indices.tolist())) == 100_000
    assert indices.min() >= 0
    assert indices.max() < 10**9
    assert order.at(5, np.array([999_950_000])).item() == indices[50_000]


def test_without_shuffling_samples_keep_the_order_of_the_data_set():
    assert InOrder(range(5), seed=0).indices(3).tolist() == [0, 1, 2, 3, 4]


def test_seeking_gives_the_same_as_replaying():
    order, plan = Shuffled(range(40), seed=0), Plan(samples=40, batch_size=8, micro_batches=2, drop_last=True)
    replayed = list(training_keys(order, plan, first_step=0, steps=12, micro_batches=[0, 1]))
    sought = list(training_keys(order, plan, first_step=7, steps=12, micro_batches=[0, 1]))
    assert sought == replayed[14:]


def test_a_process_only_sees_the_micro_batches_it_carries():
    order, plan = Shuffled(range(40), seed=0), Plan(samples=40, batch_size=8, micro_batches=4, drop_last=True)
    everything = list(training_keys(order, plan, first_step=0, steps=5, micro_batches=range(4)))
    mine = list(training_keys(order, plan, first_step=0, steps=5, micro_batches=[2, 3]))
    assert mine == [key for number, key in enumerate(everything) if number % 4 >= 2]


def test_repeated_augmentation_shows_each_sample_to_different_replicas():
    order = RepeatedAugmentation(range(1024), seed=0, repeats=4, batch_size=64, replicas=8)
    indices = order.indices(0)
    assert len(order) == len(indices) == 1024
    assert len(indices.unique()) == 256
    batch = indices[:64].view(8, 8)  # replica, sample
    assert all(len(replica.unique()) == 8 for replica in batch)
    assert len(indices[:64].unique()) == 16


GENERATOR = torch.Generator()


class Own(Order):
    """An order of a user's for 20 samples, 12 in each epoch."""

    def __init__(self, indices: Callable[[int], Any]) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return 12

    def indices(self, epoch: int) -> Any: ...


def reseeded(epoch: int) -> torch.Tensor:
    torch.manual_seed(epoch)
    return torch.randperm(20)[:12]


FAULTS = {
    "torch's seed": (lambda epoch: reseeded(torch.initial_seed()), "indices\\(0\\) draws from a global generator"),
    "one that it keeps": (lambda epoch: torch.randperm(20, generator=GENERATOR)[:12], r"indices\(0\) depends on how often it is called"),
    "too few": (lambda epoch: torch.arange(12 - epoch), r"indices\(1\) returns int64\[11\] on cpu"),
    "a list": (lambda epoch: list(range(12)), "returns a list"),
    "an error": (lambda epoch: torch.arange(12 // epoch), r"indices\(0\) fails: ZeroDivisionError: .*raised at .*test_plan_and_order"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_an_order_that_does_not_repeat_or_returns_wrong_indices_is_reported(case: str):
    indices, told = FAULTS[case]
    plan = Plan(samples=12, batch_size=6, micro_batches=1, drop_last=True)
    with pytest.raises(ConfigError, match=rf"(?s)^loader\.order: Own\.{told}" if told.startswith("indices") else f"(?s)^loader\\.order: Own.*{told}"):
        list(training_keys(Checked(Own(indices), samples=20), plan, first_step=0, steps=4, micro_batches=[0]))


@pytest.mark.parametrize("indices", [reseeded, lambda epoch: torch.arange(12) % 3, lambda epoch: torch.arange(12, dtype=torch.int32) + epoch])
def test_an_order_that_repeats_is_taken_as_it_is_and_leaves_the_generators(indices: Callable[[int], torch.Tensor]):
    torch.manual_seed(5)
    expected, _ = torch.rand(()), torch.manual_seed(5)
    order = Checked(Own(indices), samples=20)
    assert torch.rand(()) == expected
    assert torch.equal(order.indices(3), indices(3))


class Shapes:
    """A data set that only has the shapes of its images."""

    def __init__(self, length: int = 500) -> None:
        self.ratios = torch.exp(torch.randn(length, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.5)

    def __len__(self) -> int:
        return len(self.ratios)

    def aspect_ratios(self) -> torch.Tensor:
        return self.ratios


def test_groups_match_the_reference():
    bounds = [2 ** (-1 + step / 3) for step in range(7)]
    ratios = [0.3, 0.5, 0.51, 0.99, 1.0, 1.01, 1.5, 2.0, 3.0, *Shapes().ratios.tolist()]
    assert groups_of(torch.tensor(ratios, dtype=torch.float64), 3).tolist() == [bisect.bisect_right(bounds, ratio + 1e-15) for ratio in ratios]
    assert groups_of(torch.tensor([0.5, 1.0, 1.5]), 0).tolist() == [0, 1, 1]


def test_an_epoch_is_a_function_of_the_seed_and_its_number():
    orders = [GroupedByAspectRatio(Shapes(), seed=seed, batch_size=8) for seed in (3, 3, 4)]
    assert torch.equal(orders[0].indices(5), orders[1].indices(5))
    orders[1].indices(0)
    assert torch.equal(orders[0].indices(5), orders[1].indices(5))
    assert not torch.equal(orders[0].indices(5), orders[0].indices(6))
    assert not torch.equal(orders[0].indices(5), orders[2].indices(5))


@pytest.mark.parametrize("kind", ["repeated augmentation", "grouped by aspect ratio"])
def test_what_repeats_or_groups_samples_in_shards_keeps_their_window(kind: str) -> None:
    data = shards([100] * 64, 4)
    data.aspect_ratios = lambda: torch.arange(6400) % 2 + 0.5
    order = (
        RepeatedAugmentation(data, seed=1, repeats=4, batch_size=64, replicas=2)
        if kind == "repeated augmentation"
        else GroupedByAspectRatio(data, seed=1, batch_size=64)
    )
    batches = order.indices(0).view(-1, 64)
    assert all(len({*(batch // 100).tolist()}) <= 2 * 4 for batch in batches)
    assert len(set(batches.ravel().tolist())) == (1600 if kind == "repeated augmentation" else 6400)


@pytest.mark.parametrize("samples", [6400, 6390, 50])
def test_each_replica_has_shards_of_its_own(samples: int) -> None:
    data = shards([100] * (samples // 100) + [samples % 100], 2)
    order, alone = ByReplica(data, seed=1, batch_size=64, replicas=4), Windowed(data, seed=1)
    for epoch in range(2):
        indices, steps = order.indices(epoch).numpy(), samples // 64
        assert sorted(indices.tolist()) == [*range(samples)]
        sections = indices[: 64 * steps].reshape(steps, 4, 16).swapaxes(0, 1).ravel()
        assert np.array_equal(np.concatenate([sections, indices[64 * steps :]]), alone.indices(epoch).numpy())
    with pytest.raises(ConfigError, match="batch_size: cannot be divided among 3 replicas"):
        ByReplica(data, seed=1, batch_size=64, replicas=3)


@pytest.mark.parametrize(("given", "ranks"), [([], 8), (["--by-replica"], 1), (["--sets", "3"], 8)])
def test_simulated_ranks_open_few_shards_and_share_no_sample(given: list[str], ranks: int, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(repository / "tests" / "benchmarks" / "simulate_ranks.py"))["main"]
    main(["--ranks", "8", "--samples", "200000", "--shards", "400", "--window", "4", "--seeks", "2", *given])
    figures = {name: float(figure.replace(",", "")) for name, figure in (line.split(": ") for line in capsys.readouterr().out.splitlines())}
    assert figures["samples that come twice"] == 0
    assert abs(figures["ranks that need the same shard"] - ranks) < 0.5
    assert figures["shards needed in a step by a rank"] <= 4 * (3 if "--sets" in given else 1) + 1
    assert figures["memory of a process, bytes"] < 2e6


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


SETS = draw.lists(
    draw.tuples(draw.lists(draw.integers(0, 9), min_size=1, max_size=5).filter(any), draw.booleans(), draw.floats(0.001, 10)), min_size=1, max_size=5
)


@settings(deadline=None, database=None, derandomize=True, max_examples=60)
@given(SETS, draw.integers(1, 90))
def test_sets_are_mixed_by_their_weights_and_each_repeats_only_when_used_up(sets: list[tuple[list[int], bool, float]], samples: int) -> None:
    sizes = [sum(of_shards) for of_shards, _, _ in sets]
    parts = {f"set{number}": shards(x, 2) if in_shards else range(sum(x)) for number, (x, in_shards, _) in enumerate(sets)}
    weights = {name: weight for name, (_, _, weight) in zip(parts, sets, strict=True)}
    data, set_of = Joined(parts), np.repeat(np.arange(len(sets)), sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interleaved, "BLOCK", 16)
        order = Mixed(data, seed=1, weights=weights, samples=samples)
        epochs = [order.indices(epoch).numpy() for epoch in range(12)]
        # A new process that starts anywhere finds the same
        positions = np.arange(samples)[::-3]
        assert np.array_equal(Mixed(data, seed=1, weights=weights, samples=samples).at(7, positions), epochs[7][positions])
    shares = np.array([*weights.values()]) / sum(weights.values()) * samples
    drawn = np.array([np.bincount(set_of[indices], minlength=len(sets)) for indices in epochs])
    assert np.abs(drawn - shares).max() < 1 + 1e-9, "an epoch has each share, rounded"
    assert np.abs(drawn.sum(0) - 12 * shares).max() < 3, "roundings cancel over the epochs"
    assert {len(indices) for indices in epochs} == {samples}
    for indices, counts in zip(epochs, drawn, strict=True):
        for stop in range(0, samples, 16):
            assert np.abs(np.bincount(set_of[indices[:stop]], minlength=len(sets)) - counts * stop / samples).max() < len(sets), "and so has each block"
    whole = np.concatenate(epochs)
    for number, part in enumerate(parts.values()):
        alone = (Windowed if hasattr(part, "shard_sizes") else Bijection)(part, seed=streams.key(1, "set", number) >> 1)
        mine = whole[set_of[whole] == number] - sum(sizes[:number])
        passes = [alone.indices(epoch).numpy() for epoch in range(-(-len(mine) // len(part)))]
        assert np.array_equal(mine, np.concatenate([*passes, mine[:0]])[: len(mine)]), "a set's samples come as if it were alone, pass after pass"


@pytest.mark.parametrize("sizes", [[1], [700, 3000, 1], [5000, 2000]])
def test_sets_of_which_one_is_in_shards_come_whole_in_each_epoch_in_any_blocks(sizes: list[int]) -> None:
    parts = {f"set{number}": shards([size], 1) if number == 0 else range(size) for number, size in enumerate(sizes)}
    order = shuffled(Joined(parts), seed=2)
    assert type(order) is Interleaved
    epochs = [order.indices(epoch).tolist() for epoch in range(3)]
    assert all(sorted(indices) == [*range(sum(sizes))] for indices in epochs)
    assert sum(sizes) == 1 or epochs[0] != epochs[1]
    assert type(shuffled(Joined({"train": range(4), "train_b": range(3)}), seed=2)) is Shuffled


def test_sets_come_as_often_as_their_repeats_say_also_half() -> None:
    order = Repeated(Joined({"a": range(40), "b": shards([5, 5], 1), "c": range(7)}), seed=0, repeats={"a": 0.5, "b": 3, "c": 0})
    times = [np.bincount(np.concatenate([order.indices(epoch) for epoch in range(2 * both, 2 * both + 2)]), minlength=57) for both in range(3)]
    assert [x.tolist() for x in times] == [[1] * 40 + [6] * 10 + [0] * 7] * 3


def test_weights_for_each_epoch_are_a_curriculum() -> None:
    order = Mixed(Joined({"easy": range(10), "hard": range(5)}), seed=0, weights={"easy": [1, 3, 1], "hard": [0, 1]}, samples=100)
    assert [order.counts(epoch) for epoch in (0, 1, 2, 9)] == [[100, 0], [75, 25], [50, 50], [50, 50]]


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
        (Weighted, "balanced", "draws from at most 99 samples; hint: order=mixed draws"),
        (Weighted, {"cat": 1, "dog": 1, "henn": 1}, "weights: are not weights; hint: henn: did you mean 'hen'"),
        (Mixed, {"train": 1}, "several training sets: dataset.train, dataset.train_NAME"),
        (Mixed, {"train": [1, 0]}, "loader.order.weights: are not weights"),
        (Repeated, {"train": 1}, "several training sets: dataset.train, dataset.train_NAME"),
    ],
)
def test_weights_that_do_not_fit_are_refused(kind: Any, weights: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if weights == "balanced":
        monkeypatch.setattr(weighted, "_MOST_WEIGHTS", 99)
    with pytest.raises(ConfigError, match=message):
        kind(pairs(LABELS), seed=0, **{"repeats" if kind is Repeated else "weights": weights})
