"""A callback, and what it sees of a run."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from samewise.runner.errors import Problem


@dataclass(frozen=True)
class Outcome:
    """What an optimizer step came to.

    Args:
        step: Counts from 1.
        losses: By name, the loss and its parts (an accuracy among them), each the mean over what
            the recipe counts.
        count: How much that was.
        gradient_norms: The 2-norm of each phase's gradient before clipping, by name, in the order
            of the phases: `gradient_norm`, `generator/gradient_norm`.
        batch: A digest of the batch as it was loaded; 0 if the step is not traced.
        inputs: A digest of it as the model got it.
        samples: Of the batch, over all replicas: with `loader.drop_last=false` the last of an epoch
            has fewer.
    """

    step: int
    losses: Mapping[str, float]
    count: float
    gradient_norms: Mapping[str, float]
    batch: int
    inputs: int
    samples: int

    @property
    def gradient_norm(self) -> float:
        """The last phase's."""
        return list(self.gradient_norms.values())[-1]


class RunView(Protocol):
    """What a callback sees of a run.

    What it is given is its own: nothing that it does with it reaches what trains.
    """

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def epoch(self) -> float:
        """Epochs done, with their fraction."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, unless it ends sooner."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def max_epochs(self) -> int: ...

    @property
    def batch_size(self) -> int:
        """Samples that an optimizer step sees, over all replicas."""
        ...

    @property
    def samples(self) -> int:
        """Of the training split."""
        ...

    @property
    def parameters(self) -> int:
        """How many numbers the model has to learn."""
        ...

    @property
    def label(self) -> str:
        """The experiment's name, and what was overridden."""
        ...

    @property
    def evaluation_interval(self) -> int:
        """Steps between two evaluations; 0: only at the end."""
        ...

    @property
    def left_out(self) -> str:
        """What an evaluation takes of the validation split, in words, if `evaluate.limit` leaves
        something out; otherwise empty.
        """
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last evaluation; names carry their split."""
        ...

    @property
    def best(self) -> Mapping[str, float]:
        """Of the best evaluation by `evaluate.monitor`, with its `step`; empty before the first."""
        ...

    @property
    def folder(self) -> Path:
        """The run's."""
        ...

    @property
    def device(self) -> str:
        """The kind of device it computes on: cpu or cuda."""
        ...

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that logs, draws and writes."""
        ...

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the current step."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no step is left, or a callback ends training."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether this process was asked to stop, by a signal or by `interrupt`."""
        ...

    @property
    def traced(self) -> Mapping[str, Any]:
        """The last line of the trace."""
        ...

    def learning_rates(self) -> Mapping[str, Sequence[float]]:
        """Of each phase's parameter groups, without repeats, in order."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and copies of the model's parameters and buffers, made one by one.

        A tied one once, under its first name.
        """
        ...

    def copy_model(self) -> nn.Module:
        """A copy of the model with the same layout, sharded if the model is: for an average of its
        weights.
        """
        ...

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics at the current step.

        Those of a step's callbacks are sent together, at its end.

        What samewise logs itself is refused: the metrics of its evaluations from the first one on.
        `samewise verify` compares them, except those whose names begin with `speed/`, `time/`,
        `memory/` or `system/`: these may depend on the machine.
        """
        ...

    def warn(self, caution: Problem) -> None:
        """Add a warning to those that `check` and `train` print before the first step.

        For `on_build`.
        """
        ...

    def interrupt(self, reason: str) -> None:
        """Have the run save and stop after this step, in all its processes, to be resumed by the
        same command. `stop_reason` ends it for good.
        """
        ...


class Callback(abc.ABC):
    """Reads what happens and may ask to stop.

    It cannot change a number. Every method is optional.
    """

    def on_build(self, run: RunView) -> None:
        """Once, when every part of the run has been made, before a checkpoint is restored."""

    def on_start(self, run: RunView) -> None:
        """Before the first step, after a checkpoint was restored."""

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        """After an optimizer step."""

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        """After an evaluation; names carry their split (`valid/accuracy`)."""

    def on_end(self, run: RunView) -> None:
        """After the last step, however training ended."""

    def stop_reason(self) -> str | None:
        """A sentence when training should stop, else None. Asked after each evaluation and step."""
        return None

    def watched_metrics(self) -> Mapping[str, str]:
        """By argument: the metrics of evaluations by which it decides during training (`{"monitor":
        "valid/loss"}`).

        If one is not computed, `check` and the start of a training report it.
        """
        return {}

    def models(self) -> Mapping[str, nn.Module]:
        """Further models to evaluate in addition to the trained one, by prefix (`{"ema": averaged}`
        gives `ema/valid/accuracy`).

        `on_build` makes them: `samewise eval` and others call this, and `load_state_dict`, without
        `on_start`.
        """
        return {}

    def weights(self, state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights of `models`, by the same names, out of what `state_dict` gave: for `samewise
        predict`, which makes no run.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""

    def forget_evaluations(self) -> None:
        """Forget what evaluations gave: the run continues one that measured something else
        (`resume_from`).
        """
