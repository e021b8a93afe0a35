"""Finds the stage of a step, and the layer, in which two lines of a trace first differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from samewise.runner.errors import first_few
from samewise.runner.records.digest import XXH3, combine, tensor_digests
from samewise.runner.records.trace import ANYWHERE, STAGES, describe_stage, parameters_in, shorten


@dataclass(frozen=True)
class Divergence:
    """The first difference of two runs.

    Args:
        step: The optimizer step, counted from 1; for the initial weights the step before the first,
            which is 0 unless the run continues another.
        stage: A key of `trace.STAGES`; or "initial" (the initial weights), "checkpoint", "chain" (a
            checkpoint of another trace), "root" (of another summary), "metric", "summary".
        layer: The first parameter or buffer that differs (of gradients the last) as the model
            defines them, or the metric, or the summary's key, if known.
        reason: A sentence.
        since: The first step that may have caused it, from `unknown_since`; 0: `step`.
    """

    step: int
    stage: str
    layer: str
    reason: str
    since: int = 0

    def __str__(self) -> str:
        last = self.step - 1
        omitted = (
            f", or in step{f's {self.since} to' if self.since < last else ''} {last}, "
            "which the trace omits"
            if 0 < self.since <= last
            else ""
        )
        place = (
            f"; of the parameters that differ, {self.layer} is defined last"
            if self.stage == "gradients"
            else f"; first in {self.layer}"
        )
        return f"step {self.step}{omitted}: {self.reason}" + (
            place if self.layer and self.stage not in ("metric", "summary") else ""
        )


def unknown_since(step: int, compared: Collection[int]) -> int:
    """Return the first step that may have caused a difference at `step`.

    Args:
        step: The step with a difference.
        compared: The steps that were compared, such as every hundredth.
    """
    if step - 1 in compared:
        return step
    # Before its first line a trace is taken to have had the interval that follows
    first, second = [*sorted(compared), 2 * step][:2]
    return max((x for x in compared if x < step), default=max(0, first - (second - first))) + 1


def comparable_stages(head: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stages in which traces with these heads have comparable digests.

    They have one algorithm, and as many shards of parameters.
    """
    if head.get("algorithm") != other.get("algorithm"):
        # Numbers of different algorithms say nothing about each other
        return ANYWHERE
    return tuple(
        stage
        for stage in STAGES
        if head.get("shards") == other.get("shards") or stage not in ("gradients", "weights")
    )


def only_in(head: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the parameters and buffers that only the first trace has, or has as a parameter."""
    names = {(kind, name) for kind in ("gradients", "weights") for name in other.get(kind, ())}
    return list(
        dict.fromkeys(
            name
            for kind in ("gradients", "weights")
            for name in head.get(kind, ())
            if (kind, name) not in names
        )
    )


def describe_tensors(differing: Sequence[Sequence[str]], places: Sequence[str]) -> str:
    """Describe the tensors that only one of two models has.

    Args:
        differing: The names from `only_in` for each model.
        places: A description of each model's place, such as "in the first run".
    """
    only = "; ".join(
        f"{first_few(names, 6)} only {place}"
        for names, place in zip(differing, places, strict=True)
        if names
    )
    return f"the models have other parameters or buffers: {only}" if only else ""


def first_divergence(
    head: dict[str, Any],
    line: dict[str, Any],
    other_line: Mapping[str, Any],
    *,
    other: Mapping[str, Any] | None = None,
    stages: Collection[str] = tuple(STAGES),
) -> tuple[str, str] | None:
    """Return the first stage and layer in which two lines of a step differ; None if none does.

    Args:
        head: The head of the first line's trace.
        line: The first line.
        other_line: The second line.
        other: The head of the second line's trace, if it is another. If its model has other
            parameters or buffers, those of the same name are compared.
        stages: The stages to compare.

    Returns:
        The stage, and the layer, empty if unknown.
    """
    for stage in stages:
        # Python 3.12 rounds the sum of several phases' losses in another way
        is_near = stage == "loss" and _nearly_equal(line, other_line)
        if line.get(stage) == other_line.get(stage) or is_near:
            continue
        names, other_names = head.get(stage, []), (other or head).get(stage, [])
        layers = line.get("layers", {}).get(stage), other_line.get("layers", {}).get(stage)
        layer = (
            _first_layer(
                _by_name(names, layers[0]),
                _by_name(other_names, layers[1]),
                backward=stage == "gradients",
            )
            if all(layers)
            else ""
        )
        # Digests of models with other tensors differ anyway: only a common tensor tells
        if layer or names == other_names:
            return stage, layer
    return None


def _nearly_equal(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two lines' losses, float64, are the same except for their last digits."""
    return all("loss" in line for line in (record, other)) and math.isclose(
        *(float.fromhex(line["loss"]) for line in (record, other)), rel_tol=1e-12
    )


def other_start(head: Mapping[str, Any], other: Mapping[str, Any]) -> Divergence | None:
    """Return the difference of two traces' initial weights, if there is one and it is known."""
    start, there = (x.get("initial", {}) for x in (head, other))
    if (
        not start
        or start["step"] != there.get("step")
        or "weights" not in comparable_stages(head, other)
    ):
        return None
    layer = _first_layer(
        _by_name(head["weights"], start["weights"]),
        _by_name(other["weights"], there["weights"]),
        backward=False,
    )
    return (
        Divergence(
            start["step"],
            "initial",
            layer,
            "the initial weights differ",
        )
        if layer
        else None
    )


def same_start(head: Mapping[str, Any], other: Mapping[str, Any], step: int) -> bool:
    """Whether two traces with these heads begin with the same tensors before this step."""
    initial = head.get("initial", {})
    same = (
        initial.get("step") == step - 1
        and initial == other.get("initial")
        and head["weights"] == other["weights"]
    )
    return same and "weights" in comparable_stages(head, other)


def explain(
    difference: tuple[str, str],
    heads: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping[str, Any]],
    settings: Collection[str] = (),
    *,
    logged: Mapping[str, tuple[float, float]],
    several: bool,
    is_compared: bool,
) -> tuple[str, str, str]:
    """Explain the difference of two lines of a step.

    Args:
        difference: The stage and the layer, from `first_divergence`.
        heads: The heads of the two traces.
        lines: The two lines.
        settings: The settings in which the runs differ.
        logged: Both values of the step's losses and gradient norms, by name and in order, as far as
            both runs have them.
        several: Whether the step has several phases.
        is_compared: Whether the weights before the step are the same.

    Returns:
        The stage, the layer and the reason.
    """
    stage, layer = difference
    reason = describe_stage(stage, layer, heads[0], settings)
    if not several or stage not in ("loss", "gradients"):
        return stage, layer, reason
    # A later phase computes its loss with weights that an earlier one has updated, and the trace
    # has one loss for all phases: the logged values tell them apart
    phases = [name.removesuffix(_NORM) for name in logged if name.endswith(_NORM)]
    # By `repr`, so that NaN equals NaN
    unlike = [name for name, pair in logged.items() if len({*map(repr, pair)}) > 1]
    differing = {
        phase: names
        for phase in phases
        if (names := [name for name in unlike if name.startswith(f"{phase}/")])
    }
    phase, names = next(iter(differing.items()), ("", []))
    if (
        not (phase and phase == phases[0])
        and (is_compared or phases)
        and (parameter := _updated_otherwise(heads, lines))
    ):
        return "weights", parameter, STAGES["weights"]
    if not phase:
        return (
            stage,
            layer,
            f"{reason}; or, as a step has several phases, the gradients, the clipping or "
            "the optimizer of an earlier one in it",
        )
    if (first := "gradients" if names == [phase + _NORM] else "loss") != stage:
        stage, layer = first, ""
    reason = describe_stage(stage, layer, heads[0], settings).replace(
        ":", f" of phase '{phase}':", 1
    )
    return (
        stage,
        layer,
        reason
        + (
            ""
            if phase == phases[0]
            else "; or the clipping or the optimizer of a phase before it in the step"
        ),
    )


_NORM = "/gradient_norm"


def _updated_otherwise(
    heads: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]
) -> str:
    """Return the first parameter with the same gradient but other weights; empty if unknown."""
    (gradients, weights), (other_gradients, after) = (
        [
            _by_name(head.get(stage, []), line.get("layers", {}).get(stage, ""))
            for stage in ("gradients", "weights")
        ]
        for head, line in zip(heads, lines, strict=True)
    )
    same = [
        name for name, digest in gradients.items() if digest and digest == other_gradients.get(name)
    ]
    return next(
        (name for name in same if weights.get(name) != after.get(name, weights.get(name))), ""
    )


def first_altered_tensor(
    head: Mapping[str, Any], line: Mapping[str, Any], state: Mapping[str, Tensor]
) -> str | None:
    """Return the first tensor of a state_dict that differs from a trace's line.

    Empty if its name is unknown, None if all agree.
    """
    numbers = tensor_digests(
        state,
        shards=head.get("shards", 1),
        sharded=parameters_in(head),
        algorithm=head.get("algorithm", XXH3),
    )
    if f"{combine(numbers):016x}" == line["weights"]:
        return None
    there = line.get("layers", {}).get("weights", "")
    return (
        _first_layer(
            _by_name(list(state), there), _by_name(list(state), shorten(numbers)), backward=False
        )
        # Other tensors than the trace's cannot be told apart by their places
        if len(there) == 8 * len(numbers)
        else ""
    )


def _by_name(names: Sequence[str], digests: str) -> dict[str, str]:
    # A line has 8 hexadecimal digits for each tensor (`trace.shorten`)
    return {name: digests[8 * number : 8 * number + 8] for number, name in enumerate(names)}


def _first_layer(
    layers: Mapping[str, str], other_layers: Mapping[str, str], *, backward: bool
) -> str:
    """Return the first differing layer in the model's order, or the last for a backward pass."""
    # Models usually define layers in the order in which they compute
    differing = [
        name
        for name, digest in layers.items()
        if name in other_layers and other_layers[name] != digest
    ]
    return (differing[-1] if backward else differing[0]) if differing else ""
