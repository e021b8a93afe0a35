"""What settings cost: time per step of strict against fast, of the trace, and of checkpoints, as ratios within one run.

    make bench        or: python tests/benchmarks/bench_settings.py

The same training under each setting, by turns; the ratio is the median over the turns, the range holds eight of ten. Checkpoints are written far oftener than
anybody would, each five steps of a ResNet-18 with 11 million parameters and momentum (89 MB a checkpoint).
"""

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from turns import built, leave

from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run, checkpoint_due, evaluation_due, is_done
from samewise.runner.training.same_bits.determinism import apply
from samewise.runner.training.session import session
from samewise.runner.training.state import save

IMAGES = ["model=resnet18_small", "dataset=generated_classification", "dataset.samples=512", "tracking=none"]
WORK = {
    "ResNet-18 of width 16 at 32 px, batch 32": ([*IMAGES, "model.width=16", "dataset.image_size=32", "batch_size=32"], 10),
    "ResNet-18 of width 64 at 16 px, batch 16": ([*IMAGES, "dataset.image_size=16", "batch_size=16"], 5),
}
NEVER = "checkpoint.every_epochs=null"
SETTINGS = {
    "fast, no trace": ["reproducibility=fast", "trace.every_steps=0", NEVER],
    "strict, no trace": ["trace.every_steps=0", NEVER],
    "strict, a trace each 50 steps": ["trace.every_steps=50", NEVER],
    "strict, a trace each step (default)": [NEVER],
    "and a checkpoint each 5 steps": [NEVER, "checkpoint.every_steps=5"],
    "and that one in the foreground": [NEVER, "checkpoint.every_steps=5", "checkpoint.background=false"],
}
TURNS = 12


def stepper(run: Run) -> Callable[[int], float]:
    """A function that takes a number of steps, with everything that `fit` does except evaluation, and returns the seconds that they took."""
    batches = TrainingBatches(run)

    def steps(number: int) -> float:
        apply(run.config.reproducibility)
        began = time.perf_counter()
        for _ in range(number):
            if evaluation_due(run):
                run.progress.evaluated = run.step
            if checkpoint_due(run):
                save(run)
            is_done(run)
            run.recorder.record(train_step(run, next(batches)))
        return (time.perf_counter() - began) / number

    return steps


def measure(overrides: list[str], count: int) -> dict[str, list[float]]:
    """Seconds per step, for each setting and turn."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        steppers = {}
        for number, (name, own) in enumerate(SETTINGS.items()):
            run = built([*overrides, *own], Path(place) / str(number), models={})
            stack.enter_context(session(run))
            steppers[name] = run, stepper(run)
        found: dict[str, list[float]] = {name: [] for name in steppers}
        for turn in range(TURNS + 1):
            for name, (_run, steps) in steppers.items():
                spent = steps(count)
                if turn:
                    found[name].append(spent)
        for run, _steps in steppers.values():
            leave(run)
    return found


def main() -> None:
    for work, (overrides, count) in WORK.items():
        found = measure(overrides, count)
        first = next(iter(found.values()))
        print(f"{work:<44} {'ms a step':>10} {'ratio':>7}  range")
        for name, spent in found.items():
            ratios = [one / base for one, base in zip(spent, first, strict=True)]
            low, *_, high = statistics.quantiles(ratios, n=10)
            print(f"  {name:<42} {1000 * statistics.median(spent):>10.2f} {statistics.median(ratios):>7.2f}  {low:.2f} to {high:.2f}")


if __name__ == "__main__":
    main()
