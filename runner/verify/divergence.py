"""Finds the stage of a step, and the layer, in which two lines of a trace first differ."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from samewise.runner.errors import first_few
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trace import ANYWHERE, STAGES, describe_stage
from samewise.runner.records.trace_reader import Steps, common_lines


@dataclass(frozen=True)
class Divergence:
    """The first difference of two runs.

    Args:
        step: The optimizer step, counted from 1; for the initial weights the step before the first,
            which is 0 unless the run continues another.
        stage: A key of `trace.STAGES`; or "initial" (the initial weights), "checkpoint", "artifact",
            "metric", "summary".
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
    head: Mapping[str, Any],
    line: Mapping[str, Any],
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


def trace_divergence(
    folders: Sequence[RunFolder],
    heads: Sequence[Mapping[str, Any]],
    traces: Sequence[Iterable[dict[str, Any]]],
    common: Steps,
    *,
    stages: Sequence[str] = tuple(STAGES),
    settings: Collection[str] = (),
) -> Divergence | None:
    """Find the first difference of two runs' traces, and read both to their ends.

    Args:
        folders: The two runs' folders.
        heads: The heads of their traces.
        traces: The lines of their traces, in order.
        common: Gets the steps that they have in common.
        stages: The stages to compare.
        settings: The settings that differ, which may explain a difference.
    """
    (head, other), first = heads, None
    for line, other_line in common_lines(*traces):
        difference = first is None and first_divergence(
            head, line, other_line, other=other, stages=stages
        )
        if difference:
            first = line["step"], max(common, default=0), difference
        common.add(line["step"])
    if (start := other_start(head, other)) or not first:
        return start
    step, before, (stage, layer) = first
    since = unknown_since(step, {*common[:2], before or step})
    is_same_before = same_start(head, other, step) or (
        before and since == step and "weights" in stages and head["weights"] == other["weights"]
    )
    reason = describe_stage(stage, layer, head, settings)
    if stage in ("loss", "gradients"):
        # A later phase computes its loss with weights that an earlier one has updated
        if any(
            len((read_json(folder.environment, shapes.ENVIRONMENT) or {}).get("optimizers", ())) > 1
            for folder in folders
        ):
            reason += (
                "; or, as a step has several phases, the gradients, the clipping or the "
                "optimizer of an earlier one in it"
            )
        # A step begins with weights, of which the trace has a digest only after a traced step
        if not is_same_before:
            reason += "; or the weights before that step differ" + (
                "" if before else ", which a trace does not record"
            )
    return Divergence(step, stage, layer, reason, since=since)


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
