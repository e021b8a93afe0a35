"""Run an export's file in a runtime, and compare the results with the model's own."""

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
    """Results that a runtime is compared with.

    Args:
        inputs: Inputs in the call's order.
        outputs: The model's outputs.
        weights: The model's weights.
    """

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def try_runtime(form: formats.Format, path: Path, truth: Truth, tolerance: float) -> Runtime:
    """Run a file in Python, and compare its results and weights."""
    if not path.exists():
        return Runtime(form.name, f"{path.name} is missing")
    if lacks := form.lacks("run"):
        return Runtime(form.name, lacks, sound=None)
    start = time.perf_counter()
    try:
        results = formats.run(form, path, truth.inputs)
        seconds = time.perf_counter() - start
    except ValueError as error:
        return Runtime(form.name, str(error))
    altered, weights_note, unread_note = _weights(form, path, truth.weights)
    try:
        if len(results) != len(truth.outputs):
            raise ValueError(
                f"gives {len(results)} tensors, but the model gives {len(truth.outputs)}"
            )
        gap = difference(truth.outputs, dict(zip(truth.outputs, results, strict=True)))
    except ValueError as error:
        # Another number of boxes is another shape
        return Runtime(form.name, str(error) + weights_note)
    if gap is None and not altered:
        return Runtime(
            form.name, f"the same bits{unread_note}", same=True, sound=True, seconds=seconds
        )
    sound = not altered and gap is not None and gap.relative <= tolerance
    result = str(gap or "the same bits on these inputs") + (unread_note if sound else weights_note)
    return Runtime(
        form.name, result, same=gap is None, sound=sound, difference=gap, seconds=seconds
    )


def _weights(
    form: formats.Format, path: Path, weights: Mapping[str, Tensor]
) -> tuple[list[str], str, str]:
    """Compare the weights in a file with the model's.

    Returns:
        Names of weights that differ, though these inputs may not show it; a note on why results are
        wrong; and a note on why the weights cannot be read, if the format has them by name.
    """
    try:
        altered = form.altered_weights(path, weights)
    except NotImplementedError as error:
        return [], f"; its weights cannot be read: {first_line(error)}", ""
    except Exception as error:
        message = f"; its weights cannot be read: {first_line(error)}"
        return [], message, message
    message = (
        f"these weights differ from the model's: {first_few(altered, 5)}"
        if altered
        else "its weights are the model's, so an operator computes differently"
    )
    return altered, f"; {message}", ""
