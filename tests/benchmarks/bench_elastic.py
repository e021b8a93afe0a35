"""Time per step of strategy=elastic against torch's DDP on two ranks, and against strategy=single in one process, as ratios within one run.

    make bench        or: python tests/benchmarks/bench_elastic.py

Two processes over gloo train the same network on the same micro-batches, a few steps under one strategy and a few under the other, by turns; the ratio
is the median over the turns. The last lines are one process: elastic with one replica, and four replicas against the same batch in four pieces.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from turns import run_two_ranks

from samewise.runner.config import compose, project
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run

COMMON = [
    *("dataset=generated_classification", "dataset.samples=512", "transforms=images", "max_epochs=100000", "optimizer.lr=0.01", "tracking=none"),
    *("callbacks=none", "trace.every_steps=0"),
]
WORK = {
    "ResNet-18 of width 16 at 32 px, batch 32": (["model=resnet18_small", "model.width=16", "dataset.image_size=32", "batch_size=32"], 4),
    "ResNet-18 of width 32 at 8 px, batch 8, mostly exchange": (["model=resnet18_small", "model.width=32", "dataset.image_size=8", "batch_size=8"], 4),
}
TURNS = 12


def stepper(*overrides: str) -> Callable[[int], float]:
    """A function that takes a number of steps and returns the seconds that they took."""
    run: Run = build(compose.compose([*COMMON, *overrides], project=project.find()), project.find(), RunFolder(Path(tempfile.mkdtemp())))
    batches: Iterator = TrainingBatches(run)

    def steps(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            train_step(run, next(batches))
        return time.perf_counter() - began

    return steps


def compared(first: Callable[[int], float], second: Callable[[int], float], steps: int) -> tuple[float, float, float]:
    """(median ratio of their times, milliseconds per step of each)."""
    first(2), second(2)
    pairs = [(first(steps), second(steps)) if turn % 2 else (second(steps), first(steps))[::-1] for turn in range(TURNS)]
    return statistics.median(a / b for a, b in pairs), *(1000 * statistics.median(times) / steps for times in zip(*pairs, strict=True))


def rank() -> None:
    torch.set_num_threads(1)
    for name, (overrides, steps) in WORK.items():
        ratio, one, other = compared(stepper(*overrides, "replicas=2", "strategy=elastic"), stepper(*overrides, "replicas=2", "strategy=ddp"), steps)
        if os.environ["RANK"] == "0":
            print(f"2 ranks, {name}: elastic {one:.1f} ms, DDP {other:.1f} ms a step: {ratio:.3f}")


def main() -> None:
    run_two_ranks(__file__)
    torch.set_num_threads(1)
    for name, (overrides, steps) in WORK.items():
        ratio, one, other = compared(stepper(*overrides, "strategy=elastic"), stepper(*overrides, "strategy=single"), steps)
        print(f"1 process, 1 replica, {name}: elastic {one:.1f} ms, single {other:.1f} ms a step: {ratio:.3f}")
    for name, (overrides, steps) in WORK.items():
        ratio, one, other = compared(stepper(*overrides, "replicas=4"), stepper(*overrides, "accumulate=4"), steps)
        print(f"1 process, {name}: 4 replicas {one:.1f} ms, 4 accumulated micro-batches {other:.1f} ms a step: {ratio:.3f}")


if __name__ == "__main__":
    rank() if "RANK" in os.environ else main()
