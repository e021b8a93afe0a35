"""What each of many ranks reads, holds and finds when a billion samples in shards are shuffled, by the real order, plan and index; nothing is trained.

    python tests/benchmarks/simulate_ranks.py                      512 ranks, a billion samples in 100,000 shards
    python tests/benchmarks/simulate_ranks.py --by-replica         with order=by_replica, and a replica for each rank
    python tests/benchmarks/simulate_ranks.py --sets 3             as a mixture of three data sets, one of which comes twice

Of the index, the places of samples are a file without content. What is counted is of consecutive steps, in which each rank or all of them together need the
shards of two windows.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from samewise.runner.data.dataset import Joined
from samewise.runner.data.order import ByReplica, Order, shuffled
from samewise.runner.data.plan import Plan
from samewise.runner.data.weighted import Repeated
from samewise.runner.shards.index import SAMPLE, ShardIndex

NUMBERS = {"ranks": 512, "samples": 10**9, "shards": 100_000, "groups": 1, "window": 16, "batch": 32, "sets": 1, "rate": 500_000, "seeks": 20}


class Indexed:
    """A data set that is only an index, of shards whose sizes differ by a tenth."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        folder.mkdir()
        size, path, self.window = given.samples // given.shards, folder / "label.shards", given.window
        sizes = [[size * tenths // 10 // given.groups] * given.groups for tenths in (9, 11)]
        shards = given.shards // given.sets // 2 * 2
        path.write_text("".join(json.dumps([f"{number:06}.tar", 1, 1, "0" * 32, sizes[number % 2], []]) + "\n" for number in range(shards)))
        with open(path.with_suffix(".samples"), "wb") as file:
            file.truncate(shards // 2 * sum(map(sum, sizes)) * SAMPLE.itemsize)
        self.index = ShardIndex(path, str(folder))
        self.shard_sizes = np.diff(self.index.unit_ends, prepend=0)

    def __len__(self) -> int:
        return len(self.index.samples)

    def __getitem__(self, number: int) -> Any:
        raise NotImplementedError


def made(folder: Path, given: argparse.Namespace) -> tuple[list[Indexed], Order]:
    """The data sets and their order."""
    sets = [Indexed(folder / f"set{number}", given) for number in range(given.sets)]
    if given.by_replica:
        return sets, ByReplica(sets[0], seed=0, batch_size=given.ranks * given.batch, replicas=given.ranks)
    if given.sets == 1:
        return sets, shuffled(sets[0], seed=0)
    joined = Joined({f"set{number}": data for number, data in enumerate(sets)})
    return sets, Repeated(joined, seed=0, repeats={name: 2 if name == "set0" else 1 for name in joined.parts})


def simulate(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """What is printed, by what it means."""
    tracemalloc.start()
    sets, order = made(folder, given)
    order.at(0, np.arange(1))
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    sizes = np.concatenate([data.shard_sizes for data in sets])
    plan, ends = Plan(len(order), given.ranks * given.batch, given.ranks, drop_last=True), np.cumsum(sizes)
    needed = 2 * given.window * float(sizes.mean()) * given.sets / (given.batch if given.by_replica else plan.batch_size)
    steps = min(max(2, int(needed)), given.most_steps, plan.steps_per_epoch)
    first = random.Random(0).randrange(plan.steps_per_epoch - steps + 1)
    indices = np.array([order.at(0, np.arange(plan.batch_size) + step * plan.batch_size) for step in range(first, first + steps)])
    # Shard by step, rank and place
    shards = np.searchsorted(ends, indices, "right").reshape(steps, given.ranks, given.batch)
    assert plan.bounds(first, 1)[1] == first * plan.batch_size + given.batch
    of_ranks = [len(np.unique(shards[:, rank])) for rank in range(given.ranks)]
    reads, needed_shards = sum(of_ranks), len(np.unique(shards))
    seconds, chance = list[float](), random.Random(0)
    for epoch in range(1, given.seeks + 1):
        start, place = time.perf_counter(), chance.randrange(len(order) - given.batch)
        order.at(epoch, np.arange(place, place + given.batch))
        seconds.append(time.perf_counter() - start)
    return {
        "samples of an epoch": len(order),
        "shards or row groups": len(sizes),
        "memory of a process, bytes": memory,
        "index on disk, bytes": sum(map(len, sets)) * SAMPLE.itemsize,
        "steps counted": steps,
        "shards needed in a step by a rank": statistics.fmean(len(np.unique(x)) for step in shards[:20] for x in step),
        "shards needed in a step by all ranks": statistics.fmean(len(np.unique(step)) for step in shards[:20]),
        "shards needed in all these steps by a rank": statistics.fmean(of_ranks),
        "ranks that need the same shard": reads / needed_shards,
        "samples that come twice": indices.size - len(np.unique(indices)),
        "requests a second for single samples (tar)": given.rate,
        "requests a second of a rank": given.rate / given.ranks,
        "requests a second for whole row groups (tables)": given.rate / float(sizes.mean()) * reads / needed_shards,
        "neighbours from the same shard, %": 100 * float((shards[..., 1:] == shards[..., :-1]).mean()),
        "if all samples were permuted, %": 100 * float(sizes.mean()) / len(order),
        "seek to any position of another epoch, ms": 1e3 * statistics.median(seconds),
        "at most, ms": 1e3 * max(seconds),
    }


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, simulate, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--most-steps", type=int, default=300)
    parser.add_argument("--by-replica", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        for meaning, figure in simulate(Path(folder), parser.parse_args(arguments)).items():
            print(f"{meaning}: {figure:,.{0 if figure >= 100 or figure == int(figure) else 4 if figure < 0.1 else 1}f}")


if __name__ == "__main__":
    main()
