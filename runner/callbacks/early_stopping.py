"""Stop training when the monitored metric no longer improves."""

import math
from collections.abc import Mapping
from typing import Any, final

from samewise.runner.errors import ConfigError, nearest, require_at_least
from samewise.runner.interfaces import Callback, RunView


@final
class EarlyStopping(Callback):
    """Asks training to stop after `patience` evaluations without improvement.

    Args:
        monitor: The metric's name, with its split.
        mode: Which value is better: "min" or "max".
        patience: Evaluations in a row without improvement after which training stops.
        min_delta: Smallest change that counts as an improvement, in the metric's unit.
        stopping_threshold: Stop as soon as the metric is this good; None: never.
        divergence_threshold: Stop as soon as the metric is worse than this; None: never.
        check_finite: Whether to stop as soon as the metric is not a finite number.
        min_steps: Steps before which training does not stop.
        min_epochs: Epochs before which training does not stop.

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
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_finite: bool = False,
        min_steps: int = 0,
        min_epochs: int = 0,
    ) -> None:
        ConfigError.raise_if(mode not in ("min", "max"), "mode", "unknown mode", mode, "min or max")
        require_at_least({"patience": patience})
        require_at_least({"min_steps": min_steps, "min_epochs": min_epochs}, least=0)
        ConfigError.raise_if(
            not 0.0 <= min_delta < math.inf,
            "min_delta",
            "is not a valid difference",
            min_delta,
            "a number of at least 0",
        )
        self._monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._patience = patience
        self._min_delta = min_delta
        # As values of which lower is better
        self._good = -math.inf if stopping_threshold is None else self._sign * stopping_threshold
        self._bad = math.inf if divergence_threshold is None else self._sign * divergence_threshold
        self._check_finite = check_finite
        self._least = (min_steps, min_epochs)
        self.forget_evaluations()

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        ConfigError.raise_if(
            self._monitor not in metrics,
            "callbacks.early_stopping.monitor",
            "no such metric was computed",
            self._monitor,
            hint=nearest(self._monitor, metrics),
        )
        value = self._sign * metrics[self._monitor]
        # A comparison with NaN is false, so NaN is no improvement
        if value < self._best - self._min_delta:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._may_stop = not any(self._least) or (
            run.step >= self._least[0] and run.epoch >= self._least[1]
        )
        self._reason = ""
        if self._check_finite and not math.isfinite(value):
            self._reason = f"{self._monitor} is {value}, not a finite number"
        elif value <= self._good and self._good != -math.inf:
            self._reason = f"{self._monitor} has reached {self._sign * self._good:g}"
        elif value > self._bad:
            self._reason = f"{self._monitor} is worse than {self._sign * self._bad:g}"

    def watched_metrics(self) -> Mapping[str, str]:
        return {"monitor": self._monitor}

    def stop_reason(self) -> str | None:
        if not self._may_stop or (self._waited < self._patience and not self._reason):
            return None
        if self._reason:
            return self._reason
        # It stays infinite until a value is a finite number
        if self._best == math.inf:
            return f"{self._monitor} has not been a finite number in {self._waited} evaluations"
        return (
            f"{self._monitor} has not improved on {self._sign * self._best:g} for "
            f"{self._waited} evaluations"
        )

    def forget_evaluations(self) -> None:
        self._best, self._waited, self._may_stop, self._reason = math.inf, 0, True, ""

    def state_dict(self) -> dict[str, Any]:
        state = {"best": self._best, "waited": self._waited}
        # Since a version that had only these two
        return (
            state
            | ({} if self._may_stop else {"may_stop": False})
            | ({"reason": self._reason} if self._reason else {})
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._best, self._waited = state["best"], state["waited"]
            self._may_stop, self._reason = state.get("may_stop", True), state.get("reason", "")
