"""Finds options that the steps of a user's optimizer change although the schedule sets them before each step, as a learning rate that adapts itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samewise.runner.errors import Problem, first_few
from samewise.runner.optim.schedules.base import SCHEDULED
from samewise.runner.training.components import LIBRARIES
from samewise.runner.training.evaluation import tell
from samewise.runner.training.run import Run


def warn_of_overruled_options(run: Run) -> None:
    """Have a warning printed after the first step in which an optimizer of the user's changes options that the schedule sets."""
    for phase in run.phases:
        for optimizer in (phase.optimizer, getattr(phase.optimizer, "optim", None)):  # within ZeroRedundancyOptimizer
            if isinstance(optimizer, Optimizer) and type(optimizer).__module__.partition(".")[0] not in LIBRARIES:
                _watch(run, optimizer)


def _watch(run: Run, optimizer: Optimizer) -> None:
    before, told = list[dict[str, Any]](), list[Problem]()

    def remember(optimizer: Optimizer, *_: Any) -> None:
        before[:] = map(_scheduled, optimizer.param_groups)

    def compare(optimizer: Optimizer, *_: Any) -> None:
        after = map(_scheduled, optimizer.param_groups)
        changed = dict.fromkeys(key for one, other in zip(before, after, strict=False) for key in one if one[key] != other[key])
        if changed and not told:
            words = f"its step changes {first_few(list(changed), 4)}, which the schedule sets again before the next step"
            hint = "keep what it adapts in `self.param_groups` under another name, such as a factor of `lr`"
            told.append(Problem(f"optimizer ({type(optimizer).__name__})", words, hint=hint))
            tell(run, told[0])

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(compare)


def _scheduled(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a schedule sets in a parameter group; of a tensor, which may be on a device, its version."""
    found = {key: group[key] for key in SCHEDULED if key in group}
    return {key: (id(value), value._version) if isinstance(value, Tensor) else value for key, value in found.items()}
