"""Time per step against a hand-written PyTorch loop over the same work, as ratios within one run.

    make bench        or: python tests/benchmarks/bench_step.py

The hand-written loop is what a tutorial gives: a Dataset, a DataLoader, zero_grad, normalise, forward, backward, step, the loss read each
step. samewise's does all that it does by default: keyed loading, a trace with a digest of every parameter and gradient, metrics in the
journal, the learning rate's schedule. Both have deterministic algorithms on and one thread. They take turns, a hundred milliseconds and
more each; the ratio is the median over the turns. "map-style" gives samewise the hand-written loop's own Dataset, sample by sample, as users write them.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")

import copy
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from turns import built, leave

from samewise.runner.data.keyed import KeyedDataset
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run, checkpoint_due, evaluation_due, is_done
from samewise.runner.training.session import session

MLP = """\
# 64-64-10
_target_: torch.nn.Sequential
_args_:
  - {_target_: torch.nn.Flatten}
  - {_target_: torch.nn.Linear, in_features: 64, out_features: 64}
  - {_target_: torch.nn.ReLU}
  - {_target_: torch.nn.Linear, in_features: 64, out_features: 10}
"""
SMALL_IMAGES = ["dataset=generated_classification", "dataset.image_size=32", "dataset.samples=512"]
TINY = ["model=mlp", "dataset=digits", "batch_size=32"]
WORK = {
    "MLP 64-64-10, batch 32": (TINY, 200),
    "the same, no trace": ([*TINY, "trace.every_steps=0"], 200),
    "the same, to MLflow": ([*TINY, "tracking=mlflow"], 200),
    "its operators alone": (TINY, 200),
    "map-style": (TINY, 200),
    "map-style, no trace": ([*TINY, "trace.every_steps=0"], 200),
    "map-style, to MLflow": ([*TINY, "tracking=mlflow"], 200),
    "ResNet-18 at 32 px, batch 32": (["model=resnet18_small", *SMALL_IMAGES, "batch_size=32"], 6),
}
COMMON = ["transforms=images", "max_epochs=100000", "optimizer.lr=0.01", "callbacks=[throughput,learning_rate]"]


class Plain(Dataset):
    """The same samples, as a tutorial would hand them out: one at a time."""

    def __init__(self, run: Run) -> None:
        dataset = run.splits["train"].dataset
        whole = dataset.batch(range(len(dataset)))
        self.images, self.labels = whole["image"], whole["label"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


def hand_written(run: Run) -> Iterator[None]:
    """A step at each turn."""
    model = copy.deepcopy(run.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mean, deviation = (torch.tensor(list(run.config.dataset[name])).view(-1, 1, 1) for name in ("mean", "std"))
    losses = []
    while True:
        for images, labels in DataLoader(Plain(run), batch_size=run.batch_size, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model((images.float() / 255 - mean) / deviation), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            yield


def operators_alone(run: Run) -> Iterator[None]:
    """The operators of samewise's step without a trace, written by hand with nothing around them: the minimum for a step."""
    model = copy.deepcopy(run.model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    update = functools.partial(type(optimizer).step.__wrapped__, optimizer)  # without the range for the profiler
    mean, deviation = (torch.tensor(list(run.config.dataset[name])).view(-1, 1, 1) for name in ("mean", "std"))
    samples, read = Plain(run), []
    while True:
        for chosen in torch.randperm(len(samples)).split(run.batch_size)[:-1]:
            images, labels = samples.images.index_select(0, chosen), samples.labels.index_select(0, chosen)
            optimizer.zero_grad()
            logits = model(images.float().mul_(1 / 255).sub(mean).div_(deviation))
            loss, hits = F.cross_entropy(logits, labels), (logits.detach().argmax(1) == labels).sum()
            loss.backward()
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one.grad) for one in model.parameters()]))
            update()
            read.append((loss.item(), hits.item(), norm.item()))
            yield


def samewise(run: Run) -> Iterator[None]:
    """Yields after each step, with everything that `fit` does between two evaluations."""
    batches = TrainingBatches(run)
    while True:
        if evaluation_due(run):
            run.progress.evaluated = run.step  # what is measured is training
        if checkpoint_due(run):
            run.recorder.saved = run.step
        is_done(run)
        run.recorder.record(train_step(run, next(batches)))
        yield


def timed(steps: Iterator[None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - began) / count


def measure(
    overrides: list[str], count: int, *, loop: Callable[[Run], Iterator[None]] = samewise, map_style: bool = False, turns: int = 15
) -> tuple[float, float, float]:
    """(milliseconds by hand, milliseconds by samewise or another `loop`, median ratio)."""
    with tempfile.TemporaryDirectory() as folder:
        run = built([*(() if "tracking=mlflow" in overrides else ("tracking=none",)), *COMMON, *overrides], Path(folder), models={"mlp": MLP})
        if map_style:
            run.splits["train"].keyed = KeyedDataset(Plain(run), run.recipe.collate, seed=run.seed, stream="sample")
        pairs: list[tuple[float, float]] = []
        with session(run):
            loops: tuple[Iterator[None], Iterator[None]] = (hand_written(run), loop(run))
            for turn in range(turns + 2):
                pair = timed(loops[0], count), timed(loops[1], count)
                if turn >= 2:
                    pairs.append(pair)
            leave(run)
    by_hand, ours = (statistics.median(side) * 1000 for side in zip(*pairs, strict=True))
    return by_hand, ours, statistics.median(b / a for a, b in pairs)


def main(say: Callable[[str], None] = print) -> None:
    say(f"{'work':<32} {'by hand':>10} {'samewise':>10} {'ratio':>7}")
    for name, (overrides, count) in WORK.items():
        loop = operators_alone if name == "its operators alone" else samewise
        by_hand, ours, ratio = measure(overrides, count, loop=loop, map_style=name.startswith("map-style"))
        say(f"{name:<32} {by_hand:>7.3f} ms {ours:>7.3f} ms {ratio:>7.2f}")


if __name__ == "__main__":
    main()
