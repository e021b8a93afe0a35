"""A callback's view of a run: `interfaces.RunView`, of numbers and copies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from samewise.runner.errors import Problem
from samewise.runner.interfaces import Batch, RunView
from samewise.runner.training.evaluation import evaluation_batch, left_out
from samewise.runner.training.run import Run, at_end, evaluation_interval


@final
class View(RunView):
    """Implements `RunView` for a run."""

    # Two underscores mangle the names, so that no callback reaches the run by mistake
    __slots__ = ("__names", "__run")

    def __init__(self, run: Run) -> None:
        self.__run = run
        names = dict[int, str]()
        for name, tensor in run.model.state_dict(keep_vars=True).items():
            # A tied tensor is listed once, under its first name
            names.setdefault(id(tensor), name)
        # Collected once, since a forward pass may later assign one tensor to two buffers
        self.__names = list(names.values())

    def __getattr__(self, name: str) -> Any:
        names = ", ".join(sorted(name for name in dir(RunView) if not name.startswith("_")))
        raise AttributeError(f"a callback cannot access {name!r} of a run; it can access {names}")

    @property
    def step(self) -> int:
        return self.__run.step

    @property
    def epoch(self) -> float:
        return self.__run.epoch

    @property
    def total_steps(self) -> int:
        return self.__run.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self.__run.plan.steps_per_epoch

    @property
    def max_epochs(self) -> int:
        return int(self.__run.config.max_epochs)

    @property
    def batch_size(self) -> int:
        return self.__run.batch_size

    @property
    def samples(self) -> int:
        train = self.__run.splits.get("train")
        return len(train.dataset) if train else self.__run.plan.samples

    @property
    def parameters(self) -> int:
        return sum(
            parameter.numel() for parameter in self.__run.parameters if parameter.requires_grad
        )

    @property
    def label(self) -> str:
        composed = self.__run.composed
        return f"{composed.name}  {composed.label}".rstrip()

    @property
    def evaluation_interval(self) -> int:
        return evaluation_interval(self.__run)

    @property
    def read_ahead(self) -> float | None:
        train = self.__run.splits.get("train")
        return train.keyed.read_ahead if train else None

    @property
    def left_out(self) -> str:
        return left_out(self.__run, "valid") if "valid" in self.__run.splits else ""

    @property
    def metrics(self) -> Mapping[str, float]:
        return {**self.__run.progress.metrics}

    @property
    def best(self) -> Mapping[str, float]:
        return {**self.__run.progress.best}

    @property
    def folder(self) -> Path:
        return self.__run.folder.path

    @property
    def device(self) -> str:
        return self.__run.strategy.device.type

    @property
    def is_main(self) -> bool:
        return self.__run.strategy.peers.is_main

    @property
    def is_saved(self) -> bool:
        return self.__run.recorder.saved == self.__run.step

    @property
    def is_over(self) -> bool:
        return at_end(self.__run)

    @property
    def is_stopping(self) -> bool:
        return self.__run.strategy.peers.stop_heard is not None

    @property
    def traced(self) -> Mapping[str, Any]:
        return {**self.__run.recorder.trace.last}

    def learning_rates(self) -> Mapping[str, Sequence[float]]:
        return {phase.spec.name: phase.learning_rates() for phase in self.__run.phases}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        state = self.__run.model.state_dict(keep_vars=True)
        yield from ((name, state[name].detach().clone()) for name in self.__names)

    def copy_model(self) -> nn.Module:
        return self.__run.strategy.layout.copy_model(self.__run.model)

    def evaluation_batch(
        self,
        outputs: Callable[[nn.Module, Batch], Any] | None = None,
        *,
        weights: str | None = None,
    ) -> tuple[Batch, Any]:
        return evaluation_batch(self.__run, outputs, weights)

    def log(self, metrics: Mapping[str, float]) -> None:
        self.__run.recorder.require_others(metrics, self.__run.progress.metrics)
        self.__run.log(metrics)

    def warn(self, caution: Problem) -> None:
        self.__run.recorder.cautions.append(caution)

    def interrupt(self, reason: str) -> None:
        self.__run.strategy.peers.ask_stop(reason)
