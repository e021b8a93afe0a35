"""Where two lines of a trace, or a line and the weights that it describes, first differ: the stage of the step, and the layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from samewise.runner.records.digest import XXH3, combine, tensor_digests
from samewise.runner.records.trace import STAGES, shorten


@dataclass(frozen=True)
class Divergence:
    """The first difference of two runs.

    Args:
        step: The optimizer step, counted from 1.
        stage: A key of `trace.STAGES`, or "checkpoint", "chain" (a checkpoint is not of this trace), "root" (it is not the summary's), "metric", "summary".
        layer: The first parameter or buffer that differs, or the metric, or the summary's key, if one is known.
        reason: A sentence.
        altered: Whether only the record differs, and not the training that continues after it.
    """

    step: int
    stage: str
    layer: str
    reason: str
    altered: bool = False

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}" + (f"; first in {self.layer}" if self.layer and self.stage not in ("metric", "summary") else "")


def first_divergence(head: dict[str, Any], one: dict[str, Any], two: Mapping[str, Any], *, stages: Collection[str] = tuple(STAGES)) -> tuple[str, str] | None:
    """Where two lines of the same step first differ: (stage, layer), the layer empty if unknown; None if they agree in all `stages`."""
    for stage in stages:
        if one.get(stage) == two.get(stage):
            continue
        layers = one.get("layers", {}).get(stage), two.get("layers", {}).get(stage)
        return stage, _first_layer(head.get(stage, []), *layers, backward=stage == "gradients") if all(layers) else ""
    return None


def first_altered_tensor(head: Mapping[str, Any], line: Mapping[str, Any], state: Mapping[str, Tensor]) -> str | None:
    """The first tensor of a state_dict that differs from the trace's line, empty if it cannot be named; None if all agree."""
    numbers = tensor_digests(state, shards=head.get("shards", 1), sharded=head.get("gradients", ()), algorithm=head.get("algorithm", XXH3))
    if f"{combine(numbers):016x}" == line["weights"]:
        return None
    there = line.get("layers", {}).get("weights", "")
    return _first_layer(list(state), there, shorten(numbers), backward=False) if len(there) == 8 * len(numbers) else ""


def _first_layer(names: Sequence[str], first: str, second: str, *, backward: bool) -> str:
    """The first differing name in the order of computation: the backward pass reaches the last layers first."""
    differing = [name for number, name in enumerate(names) if first[8 * number : 8 * number + 8] != second[8 * number : 8 * number + 8]]
    return (differing[-1] if backward else differing[0]) if differing else ""
