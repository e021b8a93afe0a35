"""Metrics by name: torchmetrics' classification metrics, in addition to those that a recipe computes itself."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from samewise.runner.errors import ConfigError, Problem

_WITHOUT = frozenset({"loss", "accuracy"})


class NamedMetrics:
    """Some metrics, updated batch by batch on the CPU.

    Args:
        metrics: By name, each a `torchmetrics.Metric` that takes probabilities float32[B, K] and labels int64[B] and comes to one number.

    Raises:
        ConfigError: something else, or a name that the recipe's own metrics have.
    """

    def __init__(self, metrics: Mapping[str, Any] | None) -> None:
        self._metrics = dict(metrics or {})
        self.doubts = list[Problem]()
        """What torchmetrics warned of, each once."""
        for name, metric in self._metrics.items():
            if name in _WITHOUT:
                raise ConfigError(Problem(f"recipe.metrics.{name}", "is the name of a metric that the recipe computes", hint="give it another name"))
            if not all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset")):
                raise ConfigError(Problem(f"recipe.metrics.{name}", "is not a metric", type(metric).__name__, "a class of torchmetrics.classification"))

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def copy_empty(self) -> NamedMetrics:
        """The same metrics without data."""
        fresh = NamedMetrics({name: copy.deepcopy(metric) for name, metric in self._metrics.items()})
        for metric in fresh._metrics.values():
            metric.reset()
        return fresh

    def add(self, probabilities: Tensor, label: Tensor) -> None:
        """Add a batch: float32[B, K] and int64[B]."""
        for name, metric in self._metrics.items():
            try:
                with self._listening(name):
                    metric.update(probabilities, label)
            except (ValueError, RuntimeError, TypeError) as error:
                said = " ".join(str(error).split())
                words = f"does not take {probabilities.shape[1]} probabilities and a label for each sample: {said}"
                raise ConfigError(Problem(f"recipe.metrics.{name}", words)) from None

    def compute(self) -> dict[str, float]:
        """The metrics' values by name.

        Raises:
            ConfigError: one gives several numbers.
        """
        found = dict[str, float]()
        for name, metric in self._metrics.items():
            with self._listening(name):
                found[name] = _number(name, metric.compute())
        return found

    @contextmanager
    def _listening(self, name: str) -> Generator[None]:
        """Collect warnings instead of printing them with the library's source line."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for one in caught:
            said = " ".join(str(one.message).split())
            lacking = re.match(r"No (positive|negative) samples", said)
            hint = "a class that no evaluated sample has makes this metric meaningless: evaluate more samples, or use another metric" if lacking else ""
            doubt = Problem(f"recipe.metrics.{name}", f"torchmetrics warns: {said}", hint=hint)
            self.doubts += [] if doubt in self.doubts else [doubt]


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        form = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(Problem(f"recipe.metrics.{name}", "gives several numbers", form, "one number", f"recipe.metrics.{name}.average=macro"))
    return float(value)
