"""An exponential moving average of the weights, evaluated beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Callback


@final
class ExponentialMovingAverage(Callback):
    """`averaged = decay * averaged + (1 - decay) * weights`, of parameters and floating-point buffers.

    As pytorch/vision's references/classification (`utils.ExponentialMovingAverage`, train.py): `decay` is given for one sample-independent epoch and
    rescaled, `1 - decay` becoming `min(1, (1 - decay) * batch * every_steps / epochs)` with the global batch; and while
    the learning rate warms up, the average is the weights themselves.

    Args:
        decay: As published, before rescaling.
        every_steps: Steps between two updates.
        rescale: Rescale `decay` as above; else use it as it is.
        warmup_epochs: Epochs at the start in which the average follows the weights.
    """

    def __init__(self, *, decay: float = 0.99998, every_steps: int = 32, rescale: bool = True, warmup_epochs: int = 0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(Problem("callbacks.ema.decay", "must lie between 0 and 1", decay))
        if every_steps < 1:
            raise ConfigError(Problem("callbacks.ema.every_steps", "must be at least 1", every_steps))
        self._decay = decay
        self._every = every_steps
        self._rescale = rescale
        self._warmup_epochs = warmup_epochs
        self._alpha = 1.0 - decay
        self._averaged: nn.Module = nn.Identity()

    def on_build(self, run: Any) -> None:
        self._averaged = run.strategy.copied(run.model).requires_grad_(False).eval()
        if self._rescale:
            self._alpha = min(1.0, (1.0 - self._decay) * run.batch_size * self._every / run.config.max_epochs)

    @torch.no_grad()
    def on_step(self, run: Any, outcome: Any) -> None:
        if outcome.step % self._every:
            return
        alpha = 1.0 if outcome.step <= self._warmup_epochs * run.steps_per_epoch else self._alpha
        for mine, theirs in zip(self._averaged.state_dict(keep_vars=True).values(), run.model.state_dict(keep_vars=True).values(), strict=True):
            _update(mine.data, theirs.data, alpha)

    def models(self) -> Mapping[str, nn.Module]:
        return {"ema": self._averaged}

    def weights(self, state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Tensor]]:
        return {"ema": state["averaged"]} if state else {}

    def state_dict(self) -> dict[str, Any]:
        return {"averaged": self._averaged.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._averaged.load_state_dict(state["averaged"])


def _update(mine: Tensor, theirs: Tensor, alpha: float) -> None:
    if alpha == 1.0 or not mine.is_floating_point():
        mine.copy_(theirs)
    else:
        mine.lerp_(theirs, alpha)
