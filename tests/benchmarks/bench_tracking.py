"""What tracking costs the trainer: microseconds of a `log` call between steps of about 2 ms, milliseconds to start; and the sender's memory.

    make bench        or: python tests/benchmarks/bench_tracking.py

A step trains a small network on one thread, as a trainer would: a call between two steps finds the processor's caches full of other things and takes several
times as long as one call after the other does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from omegaconf import OmegaConf

from samewise.runner.config.schema import Tracking
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.tracker import open_tracker

CALLS = 2000
STEP_S = 0.002


def step_maker() -> Callable[[], None]:
    """A step of training that takes about 2 ms."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(64, 64), torch.randint(10, (64,))

    def step() -> None:
        until = time.perf_counter() + STEP_S
        while time.perf_counter() < until:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    return step


def main() -> None:
    torch.set_num_threads(1)
    train = step_maker()
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "bench" / "0123456789ab")
        folder.create()
        folder.config.write_text("seed: 0\n")
        tracker = open_tracker(folder, OmegaConf.structured(Tracking(uri=f"sqlite:///{place}/mlflow.db")), resume_step=None)
        began = time.perf_counter()
        tracker.start()
        print(f"start:                     {1e3 * (time.perf_counter() - began):8.2f} ms")
        sender = next(iter(psutil.Process().children()))
        while tracker.run_id() is None:  # the sender imports mlflow and makes the run
            time.sleep(0.1)
        costs, largest, step = {}, 0, 0
        for number in (1, 4, 16):
            metrics = {f"train/value_{i}": i / 3 for i in range(number)}
            spent = []
            for _ in range(CALLS):
                step += 1
                began = time.perf_counter()
                tracker.log(metrics, step)
                spent.append(time.perf_counter() - began)
                train()
            largest = max(largest, sender.memory_info().rss)
            costs[number] = sorted(spent)[len(spent) // 2], sum(spent) / len(spent)
        for number, (median, mean) in costs.items():
            print(f"log of {number:2d} values:          {1e6 * median:8.2f} us median, {1e6 * mean:.2f} us mean, {100 * mean / STEP_S:.2f} % of a 2 ms step")
        print(f"sender's resident memory:  {largest / 1e6:8.1f} MB, CPU {sum(sender.cpu_times()[:2]):.2f} s")
        began = time.perf_counter()
        tracker.finish("FINISHED")
        print(f"finish:                    {time.perf_counter() - began:8.2f} s")


if __name__ == "__main__":
    main()
