"""What a callback sees of a run: `interfaces.RunView`, by copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from samewise.runner.errors import Problem
from samewise.runner.interfaces import RunView
from samewise.runner.training.due import at_end, evaluation_interval
from samewise.runner.training.evaluation import left_out
from samewise.runner.training.run import Run

_SEEN: Mapping[str, Callable[[Run], Any]] = {
    "step": lambda run: run.step,
    "epoch": lambda run: run.epoch,
    "total_steps": lambda run: run.total_steps,
    "steps_per_epoch": lambda run: run.plan.steps_per_epoch,
    "max_epochs": lambda run: int(run.config.max_epochs),
    "batch_size": lambda run: run.batch_size,
    "samples": lambda run: len(run.splits["train"].dataset),
    "parameters": lambda run: sum(parameter.numel() for parameter in run.parameters if parameter.requires_grad),
    "label": lambda run: f"{run.composed.name}  {run.composed.label}".rstrip(),
    "evaluation_interval": evaluation_interval,
    "left_out": lambda run: left_out(run, "valid"),
    "metrics": lambda run: {**run.progress.metrics},
    "best": lambda run: {**run.progress.best},
    "folder": lambda run: run.folder.path,
    "device": lambda run: run.strategy.device.type,
    "is_main": lambda run: run.strategy.peers.is_main,
    "is_saved": lambda run: run.recorder.saved == run.step,
    "is_over": at_end,
    "is_stopping": lambda run: run.strategy.peers.stop_heard is not None,
    "traced": lambda run: {**run.recorder.trace.last},
    "learning_rates": lambda run: lambda: {phase.spec.name: phase.learning_rates() for phase in run.phases},
    "weights": lambda run: lambda: ((name, tensor.clone()) for name, tensor in run.model.state_dict().items()),
    "copy_model": lambda run: lambda: run.strategy.layout.copy_model(run.model),
}
"""What a callback may look at."""


@final
class View:
    """A run, to be looked at. It has what `RunView` asks for."""

    __slots__ = ("__run",)

    def __init__(self, run: Run) -> None:
        self.__run = run

    def __getattr__(self, name: str) -> Any:
        if name not in _SEEN:
            known = ", ".join(sorted(name for name in dir(RunView) if not name.startswith("_")))
            raise AttributeError(f"a callback cannot access {name!r} of a run; it can access {known}")
        return _SEEN[name](self.__run)

    def log(self, metrics: Mapping[str, float]) -> None:
        self.__run.log(metrics)

    def warn(self, caution: Problem) -> None:
        self.__run.recorder.cautions.append(caution)

    def interrupt(self, reason: str) -> None:
        self.__run.strategy.peers.ask_stop(reason)
