"""Runs an export's file in a runtime, and compares the results with the model's own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from samewise.runner.errors import first_few, first_line
from samewise.runner.exports import formats
from samewise.runner.exports.difference import difference
from samewise.runner.results import Runtime


@dataclass(frozen=True)
class Truth:
    """What a runtime is compared with: inputs in the call's order, the model's outputs, and
    its weights.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def try_runtime(form: formats.Format, path: Path, truth: Truth, tolerance: float) -> Runtime:
    """Run a file in Python."""
    if not path.exists():
        return Runtime(form.name, f"{path.name} is missing")
    if lacks := form.lacks("run"):
        return Runtime(form.name, lacks, sound=None)
    began = time.perf_counter()
    try:
        results = formats.run(form, path, truth.inputs)
        seconds = time.perf_counter() - began
    except ValueError as error:
        return Runtime(form.name, str(error))
    others, why, unread = _weights(form, path, truth.weights)
    try:
        if len(results) != len(truth.outputs):
            raise ValueError(
                f"gives {len(results)} tensors, but the model gives {len(truth.outputs)}"
            )
        apart = difference(truth.outputs, dict(zip(truth.outputs, results, strict=True)))
    except ValueError as error:  # different boxes have different shapes
        return Runtime(form.name, str(error) + why)
    if apart is None and not others:
        return Runtime(form.name, f"the same bits{unread}", same=True, sound=True, seconds=seconds)
    sound = not others and apart is not None and apart.relative <= tolerance
    words = str(apart or "the same bits on these inputs") + (unread if sound else why)
    return Runtime(form.name, words, same=apart is None, sound=sound, apart=apart, seconds=seconds)


def _weights(
    form: formats.Format, path: Path, weights: Mapping[str, Tensor]
) -> tuple[list[str], str, str]:
    """Which weights in the file differ from the model's, and two descriptions of it.

    Returns their names, though nothing may come of it for these inputs; why results are wrong; and
    why nobody could look, where the format holds weights by name.
    """
    try:
        others = form.altered_weights(path, weights)
    except NotImplementedError as error:
        return [], f"; its weights cannot be read: {first_line(error)}", ""
    except Exception as error:
        words = f"; its weights cannot be read: {first_line(error)}"
        return [], words, words
    words = (
        f"these weights differ from the model's: {first_few(others, 5)}"
        if others
        else "its weights are the model's, so an operator computes differently"
    )
    return others, f"; {words}", ""
