"""Our schedules and torch's, stepped through a training: the options of every parameter group at each step."""

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as reference

from samewise.runner.optim.schedules import Schedule

MOMENTUM = functools.partial(SGD, momentum=0.9)


def optimizer(*lrs: float, kind: Callable[..., Optimizer] = MOMENTUM) -> Optimizer:
    """With a group for each learning rate."""
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs or (0.1, 0.003, 2.0)])


def seen(made: Optimizer) -> list[float]:
    return [value for group in made.param_groups for value in (float(group["lr"]), group.get("momentum", 0.0), *group.get("betas", ()))]


def ours(schedule: Schedule, made: Optimizer | None = None, *, steps: int = 120, steps_per_epoch: int = 4) -> list[list[float]]:
    made = made or optimizer()
    schedule.begin({"train": made}, steps_per_epoch=steps_per_epoch, total_steps=steps)
    return [schedule.before_step(step) or seen(made) for step in range(steps)]


def theirs(make: Callable[[Optimizer], reference.LRScheduler], made: Optimizer | None = None, *, steps: int = 120, every: int = 4) -> list[list[float]]:
    """torch's scheduler, stepped after every `every` steps for as long as it allows."""
    made, values = made or optimizer(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(made)
        for step in range(steps):
            values.append(seen(made))
            made.step()
            if (step + 1) % every == 0 and (step + 1) // every < getattr(scheduler, "total_steps", math.inf):
                scheduler.step()
    return values
