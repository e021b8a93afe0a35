"""Metrics by name: torchmetrics' classification metrics, in addition to the recipe's own."""

import copy
import inspect
import re
import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from torch import Tensor

from samewise.recipes.parts.forms import form_of
from samewise.runner.errors import ConfigError, DataError, Problem


class NamedMetrics:
    """Metrics that are updated batch by batch on the CPU.

    Args:
        metrics: Metrics by name, each a `torchmetrics.Metric` that takes probabilities float[B, K]
            and labels int64[B] and computes one number. If images may have several labels, int64[B,
            K], torchmetrics' `Multilabel` metric replaces a `Multiclass` one, with its settings and
            the threshold 0.5.
        taken: Names of the recipe's own metrics.

    Raises:
        ConfigError: An entry is not a metric, or has the name of one of the recipe's own metrics.
    """

    def __init__(self, metrics: Mapping[str, Any] | None, taken: Collection[str] = ()) -> None:
        self._metrics = dict(metrics or {})
        self.doubts = list[Problem]()
        """What torchmetrics warned of, each once."""
        for name, metric in self._metrics.items():
            ConfigError.raise_if(
                name in taken,
                f"recipe.metrics.{name}",
                "is the name of a metric that the recipe computes",
                hint="give it another name",
            )
            ConfigError.raise_if(
                not all(
                    callable(getattr(metric, method, None))
                    for method in ("update", "compute", "reset")
                ),
                f"recipe.metrics.{name}",
                "is not a metric",
                type(metric).__name__,
                "a class of torchmetrics.classification or torchmetrics.regression",
            )

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def copy_empty(self) -> Self:
        """Return the same metrics without data."""
        fresh = NamedMetrics(
            {name: copy.deepcopy(metric) for name, metric in self._metrics.items()}
        )
        for metric in fresh._metrics.values():
            metric.reset()
        return fresh

    def add(self, probabilities: Tensor, label: Tensor) -> None:
        """Add a batch of probabilities and labels.

        Args:
            probabilities: float[B, K].
            label: int64[B], or float[B, K] of zeros and ones.

        Raises:
            ConfigError: A metric does not take them, or has no counterpart for several labels.
            DataError: A label is between zero and one.
        """
        if label.dim() == 2:
            self._metrics = {
                name: _of_several_labels(name, metric) for name, metric in self._metrics.items()
            }
            if len(between := label[(label != 0) & (label != 1)]):
                raise DataError(
                    Problem(
                        "dataset",
                        "a label is neither 0 nor 1, as "
                        f"recipe.metrics.{next(iter(self._metrics))} needs it",
                        float(between[0]),
                        "zeros and ones, or no recipe.metrics",
                    )
                )
            label = label.long()
        self._update(probabilities, label, "probabilities and a label")

    def add_numbers(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch of outputs and true values, float[B, T] each, or float[B] where T is 1."""
        if outputs.shape[1] == 1:
            outputs, labels = outputs[:, 0], labels[:, 0]
        self._update(outputs, labels, "outputs and a true value")

    def _update(self, outputs: Tensor, labels: Tensor, description: str) -> None:
        for name, metric in self._metrics.items():
            try:
                with self._listening(name):
                    metric.update(outputs, labels)
            except (ValueError, RuntimeError, TypeError) as error:
                message = " ".join(str(error).split())
                count = outputs.shape[1] if outputs.dim() > 1 else 1
                raise ConfigError(
                    Problem(
                        f"recipe.metrics.{name}",
                        f"does not take {count} {description} for each sample: {message}",
                    )
                ) from None

    def compute(self) -> dict[str, float]:
        """Return the metrics' values by name.

        Raises:
            ConfigError: A metric returns several numbers.
        """
        values = dict[str, float]()
        for name, metric in self._metrics.items():
            with self._listening(name):
                values[name] = _number(name, metric.compute())
        return values

    @contextmanager
    def _listening(self, name: str) -> Generator[None]:
        """Collect warnings instead of printing them with the library's source line."""
        with warnings.catch_warnings(record=True) as caught:
            # By default, a repeated warning is not recorded
            warnings.simplefilter("always")
            yield
        for warning in caught:
            message = " ".join(str(warning.message).split())
            lacking = re.match(r"No (positive|negative) samples", message)
            hint = (
                "a class that no evaluated sample has makes this metric meaningless: "
                "evaluate more samples, or use another metric"
                if lacking
                else ""
            )
            doubt = Problem(f"recipe.metrics.{name}", f"torchmetrics warns: {message}", hint=hint)
            self.doubts += [] if doubt in self.doubts else [doubt]


def _of_several_labels(name: str, metric: Any) -> Any:
    """Return the metric's counterpart for int64[B, K]; metrics outside torchmetrics stay."""
    from torchmetrics import classification

    # torchmetrics names its classes for the labels that they take
    kind = type(metric).__name__
    if not kind.startswith("Multiclass") or getattr(classification, kind, None) is not type(metric):
        return metric
    counterpart = getattr(classification, kind.replace("Multiclass", "Multilabel"), None)
    if counterpart is None or (getattr(metric, "top_k", None) or 1) > 1:
        binary = kind.replace("Multiclass", "Binary")
        raise ConfigError(
            Problem(
                f"recipe.metrics.{name}",
                "has no meaning where images may have several labels",
                kind,
                hint=f"leave it out; torchmetrics.classification.{binary} takes all decisions "
                "together"
                if counterpart is None
                else "leave out its top_k",
            )
        )
    arguments = [
        x for x in inspect.signature(counterpart.__init__).parameters if hasattr(metric, x)
    ]
    return counterpart(num_labels=metric.num_classes, **{x: getattr(metric, x) for x in arguments})


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            Problem(
                f"recipe.metrics.{name}",
                "gives several numbers",
                form_of(value),
                "one number",
                f"recipe.metrics.{name}.average=macro",
            )
        )
    return float(value)
