"""Images per second from loading and augmentation, compared with a DataLoader with torchvision's transforms sample by sample.

    make bench        or: python tests/benchmarks/bench_data.py

The same work on both sides: 32-pixel images in memory, padded by 4 and cropped, flipped, as floats, normalised, 128 a batch, in this process. By hand it is
torchvision.transforms.v2 in the Dataset, one image at a time, as its documentation shows; here it is `transforms=cifar`, a batch at a time, where the crop and
flip of each image are drawn from streams of the image's own key. By turns; the ratio is the median over the turns, the range holds eight of ten.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8")

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from turns import built, leave

from samewise.runner.data import streams
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.run import Run
from samewise.runner.training.session import session

OVERRIDES = [
    *("model=resnet18_small", "model.width=4", "dataset=generated_classification", "dataset.image_size=32", "dataset.samples=2048"),
    *("batch_size=128", "transforms=cifar", "tracking=none", "max_epochs=100000"),
]
TURNS, BATCHES = 15, 16


class Augmented(Dataset):
    """The same images, augmented one by one."""

    def __init__(self, run: Run) -> None:
        dataset = run.splits["train"].dataset
        whole = dataset.batch(range(len(dataset)))
        self.images, self.labels = whole["image"], whole["label"]
        mean, std = list(run.config.dataset.mean), list(run.config.dataset.std)
        self.transform = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def by_hand(run: Run) -> Iterator[torch.Tensor]:
    while True:
        for images, _labels in DataLoader(Augmented(run), batch_size=run.batch_size, shuffle=True, drop_last=True):
            yield images


def samewise(run: Run) -> Iterator[torch.Tensor]:
    for step, micro_batches in enumerate(TrainingBatches(run)):
        for micro in micro_batches:
            streams.enter(run.seed, "step", step, micro.number, 0)
            yield run.transforms["train"](micro.batch)["image"]


def rate(batches: Iterator[torch.Tensor]) -> float:
    """Images per second."""
    began, images = time.perf_counter(), 0
    for _ in range(BATCHES):
        images += len(next(batches))
    return images / (time.perf_counter() - began)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        run = built(OVERRIDES, Path(place), models={})
        with session(run):
            hand, ours = by_hand(run), samewise(run)
            rate(hand), rate(ours)
            pairs = [(rate(hand), rate(ours)) for _ in range(TURNS)]
            leave(run)
    ratios = [there / here for here, there in pairs]
    low, *_, high = statistics.quantiles(ratios, n=10)
    one, two = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"images a second: by hand {one:,.0f}, samewise {two:,.0f}: {statistics.median(ratios):.1f} times as many ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
