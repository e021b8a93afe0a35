"""Run: the parts that the loop works with, and where it stands. Built by `build`, from a config alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from samewise.runner.config import schema
from samewise.runner.config.compose import Composed
from samewise.runner.data.loading import KeyedDataset, Loader, MicroBatch, training_keys
from samewise.runner.data.order import Order
from samewise.runner.data.plan import Plan
from samewise.runner.errors import Interrupted, Problem
from samewise.runner.interfaces import Batch, Callback, Outcome, Recipe, Scores
from samewise.runner.optim.build import load_state
from samewise.runner.optim.schedules import Schedule
from samewise.runner.precision import Precision
from samewise.runner.records import shards
from samewise.runner.records.checkpoint import Checkpoints
from samewise.runner.records.digest import weights_sha256
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trace import Trace
from samewise.runner.strategies.base import Strategy
from samewise.runner.tracking.tracker import Tracker
from samewise.runner.training.finite import not_finite, require_finite_model
from samewise.runner.training.phase import TrainingPhase


@dataclass
class Split:
    """One of the data set's splits, ready to be loaded."""

    name: str
    dataset: Any
    keyed: KeyedDataset
    loader: Loader | None = None


@dataclass
class Run:
    """Everything a run is made of. What a checkpoint holds is `state()`, and nothing else changes as it trains."""

    composed: Composed
    environment: dict[str, Any]
    folder: RunFolder
    fingerprint: str
    level: str
    seed: int
    recipe: Recipe
    model: nn.Module
    network: nn.Module  # the model as the strategy wraps it; called in training
    phases: list[TrainingPhase]
    schedule: Schedule
    precision: Precision
    strategy: Strategy
    transforms: Mapping[str, Callable[[Batch], Batch]]
    splits: Mapping[str, Split]
    order: Order
    plan: Plan
    total_steps: int
    batch_size: int
    micro_batches: int
    clip_norm: float | None
    callbacks: Mapping[str, Callback]
    evaluate: schema.Evaluate
    checkpoint: schema.Checkpoint
    log_every_steps: int
    trace: Trace
    checkpoints: Checkpoints
    to_device: Callable[[Batch], Batch]
    cautions: list[Problem] = field(default_factory=list[Problem])
    """What a person should know of the settings before it trains; `on_build` may add to it."""

    tracker: Tracker = field(init=False)
    """Opened by the session, once it is known where the run resumes."""
    step: int = 0
    """Optimizer steps done; the only position there is."""
    evaluated: int = -1
    """The step at which the last evaluation was made."""
    saved: int = -1
    """The step of the last checkpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    best: dict[str, float] = field(default_factory=dict)
    """Of the best evaluation by `evaluate.monitor`, with its `step`."""
    scores: Mapping[str, Scores] = field(default_factory=dict)
    """Of the last evaluation, by split, for its pictures."""
    seconds: float = 0.0
    """Spent training in earlier sessions of this run."""
    started: float = field(default_factory=time.monotonic)
    stopped: float = 0.0
    """When training had ended, and only MLflow was still waited for."""
    require_folder: Callable[[], None] = lambda: None
    """Raises a TrainingError where the folder that the session has locked is gone."""
    ended: dict[str, Any] = field(default_factory=dict[str, Any])
    """The summary, once training has ended."""

    def __post_init__(self) -> None:
        self._parameters = list(self.model.parameters())
        self._pending: dict[str, float] = {}
        self._recording = False
        self.infinite = frozenset(not_finite(self.model.state_dict().items()))
        """The names of what is not finite from the start, as a mask may be."""

    @property
    def config(self) -> Any:
        """The resolved config, typed by `schema.Experiment`."""
        return self.composed.cfg

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    @property
    def epoch(self) -> float:
        """Epochs done, with their fraction."""
        return self.step / self.steps_per_epoch

    def batches(self) -> Iterator[list[MicroBatch]]:
        """Each step's micro-batches that this process carries, from where the run stands."""
        mine, first, settings = self.strategy.micro_batches, self.step, self.config.loader
        loader = Loader(
            self.splits["train"].keyed,
            lambda: training_keys(self.order, self.plan, first_step=first, steps=self.total_steps, micro_batches=mine),
            num_workers=settings.num_workers,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=settings.pin_memory and self.strategy.device.type == "cuda",
        )
        loaded = iter(loader)
        for step in range(first, self.total_steps):
            self.strategy.coming(self.plan, step)
            yield [MicroBatch(number, next(loaded)) for number in mine if not self.plan.is_empty(step, number)]

    def clear_gradients(self) -> None:
        """Forget every gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def evaluation_due(self) -> bool:
        """Whether the run stands where an evaluation belongs that has not been made."""
        settings = self.evaluate
        if self.evaluated == self.step or self.step == 0:
            return False
        if self._at_end():
            return True
        if settings.every_steps:
            return self.step % settings.every_steps == 0
        return bool(settings.every_epochs) and self.step % (settings.every_epochs * self.steps_per_epoch) == 0

    def checkpoint_due(self) -> bool:
        """Whether the run stands where a checkpoint belongs, or was asked to stop."""
        settings = self.checkpoint
        if self.saved == self.step or self.step == 0:
            return False
        by_steps = bool(settings.every_steps) and self.step % settings.every_steps == 0
        by_epochs = bool(settings.every_epochs) and self.step % (settings.every_epochs * self.steps_per_epoch) == 0
        is_best = settings.keep_best > 0 and self.best.get("step") == self.step
        return by_steps or by_epochs or is_best or self._at_end() or self.strategy.stop_asked is not None

    def is_done(self) -> bool:
        """Whether training has ended. Raises `Interrupted` when it was asked to stop before that."""
        if self._at_end():
            return True
        if self.strategy.stop_asked:
            raise Interrupted(Problem(f"step {self.step}", f"stopped by {self.strategy.stop_asked}, and saved", hint="the same command goes on from here"))
        return False

    def _at_end(self) -> bool:
        return self.step >= self.total_steps or self.stop_reason() is not None

    def stop_reason(self) -> str | None:
        """What a callback gives as a reason to end training."""
        return next((reason for callback in self.callbacks.values() if (reason := callback.stop_reason())), None)

    def learning_rates(self) -> list[float]:
        """Of all phases' parameter groups, without repeats, in order."""
        return list(dict.fromkeys(rate for phase in self.phases for rate in phase.learning_rates()))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics at the current step; what a step's callbacks log goes out together, at its end."""
        self._pending.update(metrics)
        if not self._recording:
            self._send()

    def _send(self) -> None:
        if self._pending:
            self.tracker.log(self._pending, self.step)
        self._pending = {}

    def record(self, outcome: Outcome) -> None:
        """Write down a step: its trace, its metrics, and what callbacks make of it."""
        self._recording = True
        self.trace.record(outcome.step, batch=outcome.batch, inputs=outcome.inputs, loss=outcome.losses.get("loss", sum(outcome.losses.values())))
        if outcome.step % self.log_every_steps == 0:
            self.log({f"train/{name}": value for name, value in outcome.losses.items()})
        for callback in self.callbacks.values():
            callback.on_step(self, outcome)
        self._recording = False
        self._send()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: named tensors and plain values. A sharded tensor is this process's shard."""
        return {
            "step": self.step,
            "evaluated": self.evaluated,
            "metrics": self.metrics,
            "best": self.best,
            "seconds": self.seconds + time.monotonic() - self.started,
            "fingerprint": self.fingerprint,
            "model": self.model.state_dict(),
            "optimizers": {phase.spec.name: self.strategy.optimizer_state(phase.optimizer) for phase in self.phases},
            "schedule": self.schedule.state_dict(),
            "precision": self.precision.state_dict(),
            "callbacks": {name: callback.state_dict() for name, callback in self.callbacks.items()},
            "trace": self.trace.chain,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Stand where `state` was taken."""
        self.step, self.evaluated, self.saved = state["step"], state["evaluated"], state["step"]
        self.metrics, self.best, self.seconds = state["metrics"], state["best"], state["seconds"]
        self.model.load_state_dict(state["model"])
        for phase in self.phases:
            load_state(phase.optimizer, state["optimizers"][phase.spec.name])
        self.schedule.load_state_dict(state["schedule"])
        self.precision.load_state_dict(state["precision"])
        for name, callback in self.callbacks.items():
            callback.load_state_dict(state["callbacks"].get(name, {}))

    def save(self) -> None:
        """Write a checkpoint, and make what was logged up to it durable.

        Raises:
            TrainingError: a weight is not finite, the run's folder is gone, or the checkpoint before this one could not be written.
        """
        require_finite_model(self)
        self.require_folder()
        state = self._in_shards() if self.checkpoint.sharded and self.strategy.shards > 1 else self.strategy.whole(self.state())
        if self.strategy.is_main:
            self.tracker.checkpointed(self.step)
            self.checkpoints.save(self.step, state, {**self.metrics} if self.evaluated == self.step else {})
        self.saved = self.step

    def _in_shards(self) -> dict[str, Any]:
        """Have every process write its shards of the state; what is left of it, and their digests."""
        folder = Path(self.strategy.first(lambda: str(self.checkpoints.shards_folder(self.step))))
        state, tensors = shards.split(self.state())
        shards.save(tensors, folder)
        written = self.strategy.peers.gather(shards.digests(folder, self.strategy.peers.rank))
        return {**state, "shards": {name: digest for some in written for name, digest in some.items()}}

    def weights_sha256(self) -> str:
        return weights_sha256(self.strategy.whole(self.model.state_dict()))

    def summary(self) -> dict[str, Any]:
        """How the run ended, as in summary.json."""
        seconds = self.seconds + (self.stopped or time.monotonic()) - self.started
        return {
            "status": "finished",
            "fingerprint": self.fingerprint,
            "level": self.level,
            "weights_sha256": self.weights_sha256(),
            "steps": self.step,
            "epochs": self.epoch,
            "stopped_early": self.stop_reason(),
            "metrics": {"final": self.metrics, "best": self.best, "monitor": self.evaluate.monitor},
            "mlflow_run_id": self.tracker.run_id(),
            "timings": {"training_s": round(seconds, 3), "step_ms": round(1000 * seconds / max(self.step, 1), 3)},
        }
