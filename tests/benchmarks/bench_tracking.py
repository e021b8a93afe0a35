"""What tracking costs the trainer: microseconds a `log` call, milliseconds to start; and the sender's memory.

python tests/benchmarks/bench_tracking.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from samewise.runner.folder import RunFolder
from samewise.runner.schema import Tracking
from samewise.runner.tracking.tracker import open_tracker

CALLS = 2000
STEP_S = 0.002


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "bench" / "0123456789ab")
        folder.create()
        folder.config.write_text("seed: 0\n")
        tracker = open_tracker(folder, OmegaConf.structured(Tracking(uri=f"sqlite:///{place}/mlflow.db")), resume_step=None)
        began = time.perf_counter()
        tracker.start()
        print(f"start:                     {1e3 * (time.perf_counter() - began):8.2f} ms")
        sender = next(iter(psutil.Process().children()))
        costs, largest, step = {}, 0, 0
        for number in (1, 4, 16):
            metrics = {f"train/value_{i}": i / 3 for i in range(number)}
            spent = []
            for _ in range(CALLS):
                step += 1
                began = time.perf_counter()
                tracker.log(metrics, step)
                spent.append(time.perf_counter() - began)
                time.sleep(STEP_S)
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
