"""Stop training when the monitored metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.interfaces import Callback, RunView


@final
class EarlyStopping(Callback):
    """Asks training to stop after `patience` evaluations without improvement.

    Args:
        monitor: The metric's name, with its split.
        mode: Which value is better: "min" or "max".
        patience: Evaluations in a row without improvement after which training stops.
        min_delta: Smallest change that counts as an improvement, in the metric's unit.

    Raises:
        ConfigError: A value is not valid.
    """

    def __init__(
        self,
        *,
        monitor: str = "valid/loss",
        mode: str = "min",
        patience: int = 10,
        min_delta: float = 0.0,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(
                Problem("callbacks.early_stopping.mode", "unknown mode", mode, "min or max")
            )
        if patience < 1:
            raise ConfigError(
                Problem("callbacks.early_stopping.patience", "must be at least 1", patience)
            )
        if not 0.0 <= min_delta < math.inf:
            raise ConfigError(
                Problem(
                    "callbacks.early_stopping.min_delta",
                    "is not a valid difference",
                    min_delta,
                    "a number of at least 0",
                )
            )
        self._monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._patience = patience
        self._min_delta = min_delta
        self.forget_evaluations()

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if self._monitor not in metrics:
            raise ConfigError(
                Problem(
                    "callbacks.early_stopping.monitor",
                    "no such metric was computed",
                    self._monitor,
                    hint=nearest(self._monitor, metrics),
                )
            )
        value = self._sign * metrics[self._monitor]
        # A comparison with NaN is false, so NaN is no improvement
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1

    def watched_metrics(self) -> Mapping[str, str]:
        return {"monitor": self._monitor}

    def stop_reason(self) -> str | None:
        if self._waited < self._patience:
            return None
        # It stays infinite until a value is a finite number
        if self._best == math.inf:
            return f"{self._monitor} has not been a finite number in {self._waited} evaluations"
        return (
            f"{self._monitor} has not improved on {self._sign * self._best:g} for "
            f"{self._waited} evaluations"
        )

    def forget_evaluations(self) -> None:
        self._best, self._waited = math.inf, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._best, self._waited = state["best"], state["waited"]
