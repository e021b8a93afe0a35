"""The learning rate range test (Smith 2017, arXiv 1506.01186, section 3.3): the rate rises at every
step, and the loss shows which rates are useful.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from samewise.runner.errors import ConfigError, Problem, TrainingError
from samewise.runner.measuring.repeated_run import RepeatedRun, SetRate
from samewise.runner.optim.build import rule_of
from samewise.runner.training.run import Run

_DIVERGED = 4.0
"""A loss so many times the first ones ends the test."""
_MARGIN = 3.0
"""The suggestion is at most the rate of the lowest loss divided by this."""
_REACH = 0.25
"""Decades of the rate to each side over which losses are averaged."""
_LEAST = 0.1
"""A smaller part of the whole fall counts as no change."""
_ERRORS = 3.0
"""A smaller number of standard errors counts as no change."""


def range_test(run: Run, *, low: float, high: float, steps: int) -> list[tuple[float, float]]:
    """Train from the start while the learning rate rises exponentially from `low` to `high`, until
    the loss diverges.

    Returns `optimizer.lr` and the loss, for each step. Parameter groups keep their ratio to it, and
    those with an `lr` of their own that. ConfigError if the experiment has several optimizers,
    whose losses do not show it, or if `optimizer.lr` decides nothing.
    """
    if len(run.phases) > 1:
        names = ", ".join(phase.spec.name for phase in run.phases)
        raise ConfigError(
            Problem(
                "optimizer",
                "the range test is for experiments with one optimizer, but this one has "
                f"several ({names})",
            )
        )
    first, given = run.phases[0], run.config.optimizer
    base = float(given.lr if "lr" in given else given[first.spec.name].lr)
    if not base > 0:
        raise ConfigError(
            Problem(
                "optimizer.lr",
                "must be greater than 0, so that parameter groups keep their proportions",
                base,
            )
        )
    fixed = {
        str(name)
        for name, rule in (run.config.param_groups or {}).items()
        if rule is not None and "lr" in rule
    }
    if all(rule_of(group) in fixed for group in first.optimizer.param_groups):
        raise ConfigError(
            Problem(
                "optimizer.lr",
                "decides nothing: every parameter group has an lr of its own",
                base,
                hint="lr_factor in place of one lr",
            )
        )
    if (highest := (run.config.scheduler or {}).get("max_lr")) is not None:
        raise ConfigError(
            Problem(
                "scheduler.max_lr",
                "decides the learning rate in place of optimizer.lr",
                highest,
                hint="scheduler.max_lr=null",
            )
        )
    rates = [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]
    curve, few = list[tuple[float, float]](), steps // 10
    schedule = SetRate(run.schedule, run, lambda step: rates[step] / base, fixed=fixed)
    try:
        for (outcome, _), rate in zip(
            RepeatedRun(run).steps(steps, schedule=schedule), rates, strict=True
        ):
            curve.append((rate, outcome.losses.get("loss", sum(outcome.losses.values()))))
            if len(curve) > few + 3 and median(loss for _, loss in curve[-3:]) > _DIVERGED * max(
                abs(loss) for _, loss in curve[:few]
            ):
                break
    except TrainingError:  # the loss is not finite
        curve.append((rates[len(curve)], math.inf))
    return curve


def suggest(curve: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Choose a learning rate from a range test.

    TrainingError if the loss did not fall by more than it scatters.

    Returns `lr`, the suggestion; `reason`; `steepest`, the rate at which the smoothed loss falls
    fastest per factor of the rate, once it has left its starting level; `lowest`, that of the
    lowest smoothed loss, beyond which training is worse; `rises`, where the smoothed loss has risen
    again, or None; `diverges`, where it is above its starting level or the loss not finite, or
    None. A change counts if it is more than `_LEAST` of the fall, and more than scatter.
    """
    finite = [(rate, loss) for rate, loss in curve if math.isfinite(loss)]
    reach, smoothed = _reach(finite), smooth(finite)
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
    start = smoothed[min(reach, lowest)] if smoothed else 0.0
    jumps = [(after - before) ** 2 for (_, before), (_, after) in pairwise(finite[: lowest + 1])]
    # Of the difference of two averages: jumps have twice the variance of a loss
    error = math.sqrt(sum(jumps) / max(1, len(jumps)) / (2 * reach + 1))
    fall = start - smoothed[lowest] if smoothed else 0.0
    if fall <= _ERRORS * error:
        message = (
            "the loss did not fall at any learning rate"
            + " by more than it scatters from step to step" * (fall > 0)
        )
        hint = (
            "more --steps, a larger batch_size, a lower --low, a higher --high; or the model "
            "does not learn from these data"
        )
        raise TrainingError(Problem("tune lr", message, hint=hint))
    least = max(_LEAST * fall, _ERRORS * error)
    left = next(at for at in range(lowest, -1, -1) if start - smoothed[at] <= least) + 1
    ends = [
        (max(0, at - reach), min(len(finite) - 1, at + reach)) for at in range(left, lowest + 1)
    ]
    falls = [
        (smoothed[before] - smoothed[after]) / math.log(finite[after][0] / finite[before][0])
        for before, after in ends
    ]
    at, best = finite[left + max(range(len(falls)), key=falls.__getitem__)][0], finite[lowest][0]
    beyond = [
        (rate, loss) for (rate, _), loss in zip(finite[lowest:], smoothed[lowest:], strict=True)
    ]
    rises = next((rate for rate, loss in beyond if loss > smoothed[lowest] + least), None)
    diverges = next(
        (rate for rate, loss in beyond if loss > start + least),
        curve[-1][0] if len(finite) < len(curve) else None,
    )
    reason = f"the loss falls fastest at {at:.2g} and is lowest at {best:.2g}"
    if diverges or rises:
        reason += (
            f"; at {diverges:.2g} training diverges"
            if diverges
            else f"; at {rises:.2g} it has risen again"
        )
    else:
        reason += (
            "; it did not rise again"
            if lowest < len(finite) - 1
            else "; it did not diverge up to there"
        )
    if at > best / _MARGIN:
        reason += f"; a third of {best:.2g} leaves a margin"
    return {
        "lr": float(f"{min(at, best / _MARGIN):.2g}"),
        "reason": reason,
        "steepest": at,
        "lowest": best,
        "rises": rises,
        "diverges": diverges,
    }


def smooth(curve: Sequence[tuple[float, float]]) -> list[float]:
    """A centred moving average of the losses: an average over the past would lag behind the rate."""
    reach, losses = _reach(curve), [loss for _, loss in curve]
    windows = [losses[max(0, at - reach) : at + reach + 1] for at in range(len(losses))]
    return [sum(window) / len(window) for window in windows]


def _reach(curve: Sequence[tuple[float, float]]) -> int:
    """How many steps to each side are averaged: `_REACH` decades of the rate, or less if the whole
    curve is short.
    """
    return (
        max(1, min(round(_REACH / math.log10(curve[1][0] / curve[0][0])), len(curve) // 10))
        if len(curve) > 1
        else 1
    )


def draw(
    curve: Sequence[tuple[float, float]], found: dict[str, Any], title: str, file: Path
) -> None:
    """Draw the curve as a PNG."""
    from matplotlib.figure import Figure

    finite = [(rate, loss) for rate, loss in curve if math.isfinite(loss)]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(*zip(*finite, strict=True), s=8, color="#c8c8c8", label="loss of each step")
    smoothed = smooth(finite)
    axes.plot([rate for rate, _ in finite], smoothed, color="#1f77b4", label="smoothed")
    axes.axvline(found["lr"], color="#2ca02c", label=f"suggested: {found['lr']:g}")
    axes.axvline(
        found["lowest"], color="#ff7f0e", linestyle=":", label=f"lowest loss: {found['lowest']:.2g}"
    )
    axes.set_xscale("log")
    low, top = min(smoothed), max(smoothed[: max(1, len(smoothed) // 2)])
    axes.set_ylim(low - 0.1 * (top - low), top + 0.5 * (top - low) or None)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    axes.set_title(title.replace("$", r"\$"), fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, format="png", dpi=110)
