"""Loops that benchmarks compare: a hand-written one over the samples of a run, as a tutorial gives it, and samewise's between two evaluations."""

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Run, checkpoint_due, evaluation_due, is_done

MLP = """\
# 64-64-10
_target_: torch.nn.Sequential
_args_:
  - {_target_: torch.nn.Flatten}
  - {_target_: torch.nn.Linear, in_features: 64, out_features: 64}
  - {_target_: torch.nn.ReLU}
  - {_target_: torch.nn.Linear, in_features: 64, out_features: 10}
"""


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
