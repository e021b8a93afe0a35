"""Average the weights exponentially, and evaluate the average in addition to the model."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem, require_at_least
from samewise.runner.interfaces import Callback, Outcome, RunView

HORIZON = 0.05
"""Mean age of the averaged weights, as a share of the steps. torchvision's published recipe has
0.04."""


@final
class ExponentialMovingAverage(Callback):
    """Averages parameters and floating-point buffers: `decay * averaged + (1 - decay) * weights`.

    Without a `decay`, the average reaches back over a fixed share of the steps so far, however many
    they are: the n-th update has `decay = (1 - 1 / n) ** (1 / horizon - 1)`, so that after n
    updates the mean age is `horizon * n`, and the initial weights count for nothing (Karras et al.
    2023, arXiv 2312.02696, section 3.1: the power function average).

    A `decay` is the same at every update. With `rescale`, as in pytorch/vision's
    references/classification (`utils.ExponentialMovingAverage`, train.py), `1 - decay` becomes
    `min(1, (1 - decay) * batch * every_steps / epochs)` with the global batch.

    While the learning rate warms up, the average equals the weights. Parameters that no step has
    trained since the last update, as their phase is left out (`Phase.every`), are not averaged again.

    Args:
        decay: Decay of every update, in [0, 1]; None: grows with the number of updates.
        every_steps: Steps between two updates.
        rescale: Rescale `decay` to the batch and the epochs.
        warmup_epochs: Epochs at the start in which the average follows the weights.
        horizon: Without a `decay`, the mean age as a share of the steps; None: `HORIZON`. With 0.5
            all weights count the same, as in stochastic weight averaging.
        every_epochs: Epochs between two updates, instead of `every_steps`.
        name: Prefix of the average's metrics.

    Raises:
        ConfigError: A value is not valid, or has no effect beside the others.
    """

    def __init__(
        self,
        *,
        decay: float | None = None,
        every_steps: int = 1,
        rescale: bool = False,
        warmup_epochs: int = 0,
        horizon: float | None = None,
        every_epochs: int | None = None,
        name: str = "ema",
    ) -> None:
        require_at_least(
            {
                "every_steps": every_steps,
                "every_epochs": 1 if every_epochs is None else every_epochs,
            }
        )
        ConfigError.raise_if(
            decay is not None and not 0.0 <= decay <= 1.0,
            "callbacks.ema.decay",
            "must lie between 0 and 1",
            decay,
        )
        ConfigError.raise_if(
            rescale and decay is None,
            "callbacks.ema.rescale",
            "needs a decay to rescale",
            rescale,
            "false, or set callbacks.ema.decay",
        )
        ConfigError.raise_if(
            horizon is not None and not 0.0 < horizon < 1.0,
            "callbacks.ema.horizon",
            "is not a valid share of the steps",
            horizon,
            "a number between 0 and 1, such as 0.05",
        )
        ConfigError.raise_if(
            horizon is not None and decay is not None,
            "callbacks.ema.horizon",
            "has no effect together with a decay",
            horizon,
            "a horizon or a decay, not both",
        )
        self._decay = decay
        self._every = every_steps
        self._every_epochs, self._name = every_epochs, name
        self._rescale = rescale
        self._warmup_epochs = warmup_epochs
        self._power = 1.0 / (HORIZON if horizon is None else horizon) - 1.0
        self._alpha = 0.0 if decay is None else 1.0 - decay
        self._averaged: nn.Module = nn.Identity()
        self._start: int | None = None
        # Parameters that no step has trained since the last update, and, by name, how many updates
        # parameters have missed so
        self._idle = frozenset[str]()
        self._missed = dict[str, int]()

    def on_build(self, run: RunView) -> None:
        self._averaged = run.copy_model().requires_grad_(False).eval()
        self._every = (self._every_epochs or 0) * run.steps_per_epoch or self._every
        if self._rescale:
            self._alpha = min(1.0, self._alpha * run.batch_size * self._every / run.max_epochs)
        for caution in self._cautions(run.total_steps, self._warmup_epochs * run.steps_per_epoch):
            run.warn(caution)

    def on_start(self, run: RunView) -> None:
        if self._start is not None:
            return
        self._start = run.step
        # A checkpoint without an average: this one begins with the checkpoint's weights
        if run.step:
            self._update(run, run.step, run.step)

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        is_first = (outcome.step - 1) % self._every == 0
        self._idle = outcome.skipped if is_first else self._idle & outcome.skipped
        if outcome.step % self._every == 0:
            first = max(self._start or 0, self._warmup_epochs * run.steps_per_epoch)
            if outcome.step > first:
                self._missed |= {name: self._missed.get(name, 0) + 1 for name in self._idle}
            self._update(run, outcome.step, first)

    @torch.no_grad()
    def _update(self, run: RunView, step: int, first: int) -> None:
        # By id, so that a tied tensor is updated once
        tensors = {
            id(tensor): tensor for tensor in self._averaged.state_dict(keep_vars=True).values()
        }
        for averaged, (name, weight) in zip(tensors.values(), run.weights(), strict=True):
            if name in self._idle:
                continue
            alpha = self._weight(step - self._every * self._missed.get(name, 0), first)
            # Integers, such as batch norm's count of batches, are copied
            if alpha != 1.0 and (averaged.is_floating_point() or averaged.is_complex()):
                averaged.lerp_(weight, alpha)
            else:
                averaged.copy_(weight)

    def _weight(self, step: int, first: int) -> float:
        """Return the current weights' share at a step, if the average begins after `first`."""
        if step <= first:
            return 1.0
        if self._decay is not None:
            return self._alpha
        return 1.0 - (1.0 - 1.0 / (step // self._every - first // self._every)) ** self._power

    def _cautions(self, steps: int, first: int) -> list[Problem]:
        """Return warnings if the average would stay close to the weights that it begins with.

        Args:
            steps: Steps of the run.
            first: Step after which the average begins.
        """
        if self._every > steps or first >= steps:
            message = f"none of the run's {steps:,} steps is averaged"
            return [
                Problem("callbacks.ema", message, hint="a smaller every_steps or warmup_epochs")
            ]
        horizon = self._every / self._alpha if self._alpha else math.inf
        if self._decay is None or horizon <= steps - first:
            return []
        message = (
            f"the average spans about {horizon:,.0f} steps, but the run has only "
            f"{steps - first:,} for it, so it stays close to its first weights"
        )
        return [
            Problem(
                "callbacks.ema.decay",
                message,
                self._decay,
                hint="callbacks.ema.decay=null callbacks.ema.rescale=false adapts to the number "
                "of steps",
            )
        ]

    def models(self) -> Mapping[str, nn.Module]:
        return {self._name: self._averaged}

    def weights(self, state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
        return {self._name: state["averaged"]} if state else {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "averaged": self._averaged.state_dict(),
            **({"start": self._start} if self._start else {}),
            **({"missed": {**self._missed}} if self._missed else {}),
            **({"idle": sorted(self._idle)} if self._idle else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._averaged.load_state_dict(state["averaged"])
            self._start = state.get("start", 0)
            self._missed = {**state.get("missed", {})}
            self._idle = frozenset(state.get("idle", ()))
