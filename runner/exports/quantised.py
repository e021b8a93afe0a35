"""Measures what quantisation loses: the metric that chose the checkpoint, on the validation split, with the quantised model and with the model itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samewise.runner.data.keyed import evaluation_keys
from samewise.runner.data.loading import Loader
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.exports.call import Call, observe
from samewise.runner.exports.format import Run as Runtime
from samewise.runner.interfaces import Batch
from samewise.runner.training.evaluation import measure_split, metrics_of
from samewise.runner.training.run import Run

EXAMPLES: Final = 64
"""Samples of the training split from which the quantiser takes the ranges of numbers."""
_AT_ONCE: Final = 8


@dataclass(frozen=True)
class Accuracy:
    """A metric of a model and of its quantised version, and the relative loss (negative: better)."""

    metric: str
    exact: float
    quantised: float
    lost: float
    samples: int

    def __str__(self) -> str:
        return f"{self.metric} {self.quantised:.4g} in int8, {self.exact:.4g} in float32, on {self.samples:,} samples"


def examples(run: Run, model: nn.Module, call: Call, *, module: str | None) -> tuple[dict[str, Tensor], ...]:
    """The call's inputs for the first samples of the training split, transformed as in evaluation."""
    part, transform = run.splits["train"], run.transforms["eval"]
    keys = islice(evaluation_keys(len(part.dataset), _AT_ONCE), EXAMPLES // _AT_ONCE)
    seen = (observe(run.recipe, model, run.to_device(batch), transform, module=module, whole=call.whole) for batch in Loader(part.keyed, lambda: keys))
    return tuple(one for batch in seen for one in _split_batch(call, batch.inputs))


def _split_batch(call: Call, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Inputs as a file accepts them: one by one if its batch size is fixed at 1."""
    size = len(next(iter(inputs.values())))
    alone = all(len(tensor) == 1 for tensor in call.inputs.values())
    return [{name: tensor[place : place + 1] for name, tensor in inputs.items()} for place in range(size)] if alone else [inputs]


def accuracy(run: Run, model: nn.Module, call: Call, runtime: Runtime, *, most: float) -> Accuracy:
    """The metric that chooses the run's checkpoints, with the model and with a runtime in place of `call`, which may be a part of it.

    ConfigError if more is lost, or if the recipe measures the model in another way than by this call.
    """
    name = run.evaluate.monitor.rpartition("/")[2]
    exact = metrics_of(measure_split(run, "valid", model), "")[name]
    with _replace_model(run, call, runtime) as calls:
        quantised = metrics_of(measure_split(run, "valid", model), "")[name]
    if not calls:
        words = "cannot be measured: the recipe evaluates the model by calls other than the exported one"
        raise ConfigError(Problem("--to", f"the loss of accuracy {words}", type(run.recipe).__name__))
    worse = exact - quantised if str(run.evaluate.mode) == "max" else quantised - exact
    limit, batch = run.evaluate.limit, run.evaluate.batch_size
    samples = min(len(run.splits["valid"].dataset), limit * batch if limit is not None else 1 << 62)
    found = Accuracy(name, exact, quantised, worse / (abs(exact) or 1.0), samples)
    if not found.lost <= most:  # nan too
        words = f"was not exported: quantised, it loses {found.lost:.2g} of its accuracy: {found}"
        raise ConfigError(Problem("--to", words, expected=f"at most {most:g}", hint="--most-lost accepts a larger loss"))
    return found


@contextmanager
def _replace_model(run: Run, call: Call, runtime: Runtime) -> Generator[list[None]]:
    """Within it, a runtime computes in the model's place; the list gets one entry per call."""
    model, asked, loaded = call.function.model, list[None](), Batch()
    transforms = cast("dict[str, Any]", run.transforms)
    transform = transforms["eval"]

    def remember(batch: Batch) -> Batch:
        loaded.clear()
        loaded.update(batch)
        return transform(batch)

    def forward(*args: Any, **kwargs: Any) -> Any:
        asked.append(None)
        given = [loaded[name] for name in call.inputs] if call.whole else [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        parts = [runtime(one) for one in _split_batch(call, dict(zip(call.inputs, given, strict=True)))]
        return call.returned([torch.cat(of) for of in zip(*parts, strict=True)] if len(parts) > 1 else parts[0])

    transforms["eval"], model.forward = remember, forward
    try:
        with torch.no_grad():
            yield asked
    finally:
        transforms["eval"] = transform
        del model.forward
