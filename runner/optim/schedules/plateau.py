"""Learning rate that falls when a metric stops improving: the only schedule with a state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from samewise.runner.errors import ConfigError, nearest

from .base import LearningRate, number, require_number, require_whole


@final
@dataclass(kw_only=True, eq=False)
class Plateau(LearningRate):
    """Reduction of the learning rate when a metric stops improving, as torch's ReduceLROnPlateau.

    After more than `patience` evaluations without improvement of `metric`, the learning rate is
    multiplied by `factor`, from the next step on. Evaluations are counted, so there is no unit of
    time.

    Args:
        metric: Metric to follow, with its split: `valid/loss`.
        mode: `min` if lower is better, `max` if higher is.
        factor: Factor of each reduction, below 1.
        patience: Number of evaluations without improvement before a reduction.
        threshold: Smallest difference that counts as an improvement.
        threshold_mode: `rel`: `threshold` is a share of the best value; `abs`: a difference.
        cooldown: Evaluations after a reduction that are not counted.
        min_lr: Lowest learning rate.
        eps: Reductions by at most this much are skipped.

    Raises:
        ConfigError: An argument is out of its range.
    """

    metric: str = "valid/loss"
    mode: Literal["min", "max"] = "min"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__init__()
        ConfigError.raise_if(
            not self.metric,
            "metric",
            "is not the name of a metric",
            self.metric,
            "a name such as valid/loss",
        )
        ConfigError.raise_if(
            self.mode not in ("min", "max"), "mode", "is not a valid mode", self.mode, "min or max"
        )
        ConfigError.raise_if(
            not number(self.factor, least=0) or self.factor >= 1,
            "factor",
            "would not reduce the learning rate",
            self.factor,
            "a number from 0 to below 1",
        )
        ConfigError.raise_if(
            self.threshold_mode not in ("rel", "abs"),
            "threshold_mode",
            "is not a valid mode",
            self.threshold_mode,
            "rel or abs",
        )
        require_whole(
            "number of evaluations", least=0, patience=self.patience, cooldown=self.cooldown
        )
        require_number("threshold", threshold=self.threshold)
        require_number("learning rate", min_lr=self.min_lr)
        require_number("difference", eps=self.eps)
        self.cooling = 0
        self.reductions = 0
        self.forget_evaluations()

    def rate(self, time: int, lr: float) -> float:
        # One by one, since `min_lr` and `eps` may stop some of them
        for _ in range(self.reductions):
            lower = max(lr * self.factor, self.min_lr)
            lr = lower if lr - lower > self.eps else lr
        return lr

    def after_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Count this evaluation.

        Args:
            metrics: The evaluation's metrics, by name.

        Raises:
            ConfigError: The metric is not among them.
        """
        ConfigError.raise_if(
            self.metric not in metrics,
            "scheduler.metric",
            "is not among the metrics of the evaluation",
            self.metric,
            hint=nearest(self.metric, metrics),
        )
        current = float(metrics[self.metric])
        if self._better(current):
            self.best, self.bad = current, 0
        else:
            self.bad += 1
        # As in torch: evaluations during the cooldown are not counted
        if self.cooling:
            self.cooling, self.bad = self.cooling - 1, 0
        if self.bad > self.patience:
            self.reductions, self.cooling, self.bad = self.reductions + 1, self.cooldown, 0

    def watched_metrics(self, path: str = "scheduler") -> dict[str, str]:
        return {f"{path}.metric": self.metric}

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "bad": self.bad,
            "cooling": self.cooling,
            "reductions": self.reductions,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.bad, self.cooling, self.reductions = (
            state["best"],
            state["bad"],
            state["cooling"],
            state["reductions"],
        )

    def forget_evaluations(self) -> None:
        """Forget the best value and the evaluations since; reductions stay."""
        self.best, self.bad = math.inf if self.mode == "min" else -math.inf, 0

    def _better(self, current: float) -> bool:
        sign = -1 if self.mode == "min" else 1
        margin = (
            self.best * (1 + sign * self.threshold)
            if self.threshold_mode == "rel"
            else self.best + sign * self.threshold
        )
        return current < margin if self.mode == "min" else current > margin
