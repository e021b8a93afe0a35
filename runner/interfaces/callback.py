"""A callback, and what it sees of a run."""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samewise.runner.errors import Problem
from samewise.runner.interfaces.batch import Batch


@dataclass(frozen=True)
class Outcome:
    """The outcome of an optimizer step.

    Args:
        step: The step's number, from 1.
        losses: The loss and its parts (an accuracy among them) by name, each the mean over the
            items that the recipe counts.
        count: Number of items the means are taken over.
        gradient_norms: The 2-norm of each phase's gradient before clipping, by name, in the order
            of the phases: `gradient_norm`, `generator/gradient_norm`.
        batch: Digest of the batch as it was loaded; 0 if the step is not traced.
        inputs: Digest of the batch as the model got it.
        samples: Number of samples of the batch over all replicas; with `loader.drop_last=false`
            the last batch of an epoch has fewer.
        skipped: Names of the parameters whose phases are left out of this step (`Phase.every`).
    """

    step: int
    losses: Mapping[str, float]
    count: float
    gradient_norms: Mapping[str, float]
    batch: int
    inputs: int
    samples: int
    skipped: frozenset[str] = frozenset()

    @property
    def gradient_norm(self) -> float:
        """The last phase's."""
        return list(self.gradient_norms.values())[-1]


class RunView(abc.ABC):
    """A callback's view of the run.

    Everything it returns is a copy: changes do not reach training.
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    @abc.abstractmethod
    def epoch(self) -> float:
        """Epochs done, with their fraction."""

    @property
    @abc.abstractmethod
    def total_steps(self) -> int:
        """Steps of the whole run, unless it ends sooner."""

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int: ...

    @property
    @abc.abstractmethod
    def max_epochs(self) -> int: ...

    @property
    @abc.abstractmethod
    def batch_size(self) -> int:
        """Samples that an optimizer step sees, over all replicas."""

    @property
    @abc.abstractmethod
    def samples(self) -> int:
        """Number of samples of the training split."""

    @property
    @abc.abstractmethod
    def parameters(self) -> int:
        """Number of trainable weights of the model."""

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The experiment's name, and what was overridden."""

    @property
    @abc.abstractmethod
    def evaluation_interval(self) -> int:
        """Steps between two evaluations; 0: only at the end."""

    @property
    @abc.abstractmethod
    def read_ahead(self) -> float | None:
        """Batches that are read before their turn, of shards in an object store; else None."""

    @property
    @abc.abstractmethod
    def left_out(self) -> str:
        """The part of the validation split that `evaluate.limit` takes; empty: all of it."""

    @property
    @abc.abstractmethod
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last evaluation; names carry their split."""

    @property
    @abc.abstractmethod
    def best(self) -> Mapping[str, float]:
        """Metrics of the best evaluation by `evaluate.monitor`, with its `step`; empty at first."""

    @property
    @abc.abstractmethod
    def folder(self) -> Path:
        """The run's."""

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """The kind of device it computes on: cpu or cuda."""

    @property
    @abc.abstractmethod
    def is_main(self) -> bool:
        """True in the process that logs, draws and writes."""

    @property
    @abc.abstractmethod
    def is_saved(self) -> bool:
        """True if a checkpoint of the current step exists."""

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """True if no step is left, or a callback ends training."""

    @property
    @abc.abstractmethod
    def is_stopping(self) -> bool:
        """True if a signal or `interrupt` asked this process to stop."""

    @property
    @abc.abstractmethod
    def traced(self) -> Mapping[str, Any]:
        """The last line of the trace."""

    @abc.abstractmethod
    def learning_rates(self) -> Mapping[str, Sequence[float]]:
        """Learning rates of each phase's parameter groups, without repeats, in order."""

    @abc.abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and copies of the model's parameters and buffers, made one by one.

        A tied one once, under its first name.
        """

    @abc.abstractmethod
    def copy_model(self) -> nn.Module:
        """Copy the model with its layout (sharded if the model is), to average its weights."""

    @abc.abstractmethod
    def evaluation_batch(
        self,
        outputs: Callable[[nn.Module, Batch], Any] | None = None,
        *,
        weights: str | None = None,
    ) -> tuple[Batch, Any]:
        """Return the validation split's first batch and outputs for it, to draw: on the CPU.

        The batch is transformed as for the model. Each rank computes the same, from the random
        numbers of an evaluation, so all ranks must call this; `is_main` writes.

        Args:
            outputs: Computes the outputs from the model, in eval mode without gradients, and the
                batch. It may not change the model. None: `Recipe.measure`.
            weights: The name of a callback's weights, such as `ema`; None: the trained ones.
        """

    @abc.abstractmethod
    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics at the current step.

        Those of a step's callbacks are sent together, at its end.

        What samewise logs itself is refused: the metrics of its evaluations from the first one on.
        `samewise verify` compares them, except those whose names begin with `speed/`, `time/`,
        `memory/` or `system/`: these may depend on the machine.
        """

    @abc.abstractmethod
    def warn(self, caution: Problem) -> None:
        """Add a warning to those that `check` and `train` print before the first step.

        For `on_build`.
        """

    @abc.abstractmethod
    def interrupt(self, reason: str) -> None:
        """Save and stop after this step, in all processes; the same command resumes the run.

        `stop_reason` ends the run for good.
        """


class Callback(abc.ABC):
    """Reads what happens and may ask to stop.

    It cannot change a number. Every method is optional.
    """

    def on_build(self, run: RunView) -> None:
        """Once, when every part of the run has been made, before a checkpoint is restored."""

    def on_start(self, run: RunView) -> None:
        """Before the first step, after a checkpoint was restored."""

    def on_epoch_start(self, run: RunView) -> None:
        """Before the first step of an epoch."""

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        """After an optimizer step."""

    def on_epoch_end(self, run: RunView) -> None:
        """After the last step of an epoch, before an evaluation."""

    def on_evaluation_start(self, run: RunView) -> None:
        """Before an evaluation."""

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """After an evaluation; names carry their split (`valid/accuracy`)."""

    def on_end(self, run: RunView) -> None:
        """After the last step, however training ended."""

    def stop_reason(self) -> str | None:
        """A sentence when training should stop, else None. Asked after each evaluation and step."""
        return None

    def watched_metrics(self) -> Mapping[str, str]:
        """Metrics of evaluations that decide something during training, by argument.

        For example `{"monitor": "valid/loss"}`. `check` and the start of a training report a metric
        that is not computed.
        """
        return {}

    adds: Sequence[str] = ()
    """The names of `metrics`, or how they begin; `check` compares what decides with them."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics to add to an evaluation, by which it may then be decided.

        Asked once in each evaluation. They must be the same on every rank.
        """
        return {}

    def models(self) -> Mapping[str, nn.Module]:
        """Models to evaluate besides the trained one, by prefix.

        `{"ema": averaged}` gives `ema/valid/accuracy`. `on_build` makes them: `samewise eval` and
        others call this, and `load_state_dict`, without `on_start`.
        """
        return {}

    def weights(self, state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the weights of `models`, by the same names, out of a `state_dict`.

        `samewise predict` calls it, which makes no run.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def forget_evaluations(self) -> None:
        """Forget past evaluations: the run continues (`resume_from`) one with other metrics."""
