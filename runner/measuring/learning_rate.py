"""Run the learning rate range test: the rate rises, and the loss shows which rates are useful.

Smith 2017, arXiv 1506.01186, section 3.3.
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
"""Multiple of the first losses at which the test ends."""
_MARGIN = 3.0
"""Divisor of the rate with the lowest loss; the suggestion is at most the quotient."""
_DECADES = 0.25
"""Decades of the rate to each side over which losses are averaged."""
_MIN_SHARE = 0.1
"""Share of the whole fall below which a change does not count."""
_STANDARD_ERRORS = 3.0
"""Number of standard errors below which a change does not count."""


def range_test(run: Run, *, low: float, high: float, steps: int) -> list[tuple[float, float]]:
    """Train while the learning rate rises exponentially, until the loss diverges.

    Parameter groups keep their ratio to `optimizer.lr`; those with an `lr` of their own keep it.

    Args:
        run: Run at its start.
        low: First `optimizer.lr`.
        high: Last `optimizer.lr`.
        steps: Number of steps.

    Returns:
        `optimizer.lr` and the loss of each step.

    Raises:
        ConfigError: The experiment has several optimizers, whose losses do not show the effect of a
            rate, or `optimizer.lr` has no effect.
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
    phase, settings = run.phases[0], run.config.optimizer
    base = float(settings.lr if "lr" in settings else settings[phase.spec.name].lr)
    if not base > 0:
        raise ConfigError(
            Problem(
                "optimizer.lr",
                "must be greater than 0, so that parameter groups keep their proportions",
                base,
            )
        )
    fixed_rules = {
        str(name)
        for name, rule in (run.config.param_groups or {}).items()
        if rule is not None and "lr" in rule
    }
    if all(rule_of(group) in fixed_rules for group in phase.optimizer.param_groups):
        raise ConfigError(
            Problem(
                "optimizer.lr",
                "has no effect: every parameter group has an lr of its own",
                base,
                hint="lr_factor in place of one group's lr",
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
    curve, first_steps = list[tuple[float, float]](), steps // 10
    schedule = SetRate(run.schedule, run, lambda step: rates[step] / base, fixed=fixed_rules)
    try:
        for (outcome, _), rate in zip(
            RepeatedRun(run).steps(steps, schedule=schedule), rates, strict=True
        ):
            curve.append((rate, outcome.losses.get("loss", sum(outcome.losses.values()))))
            if len(curve) > first_steps + 3 and median(
                loss for _, loss in curve[-3:]
            ) > _DIVERGED * max(abs(loss) for _, loss in curve[:first_steps]):
                break
    except TrainingError:
        # The loss is not finite
        curve.append((rates[len(curve)], math.inf))
    return curve


def suggest(curve: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Choose a learning rate from a range test.

    A change of the smoothed loss counts if it is more than `_MIN_SHARE` of the fall, and more than
    scatter.

    Args:
        curve: Learning rate and loss of each step.

    Returns:
        `lr`: the suggestion. `reason`: a sentence. `steepest`: the rate at which the loss falls
        fastest per factor of the rate, once it has left its starting level. `lowest`: the rate of
        the lowest loss, beyond which training is worse. `rises`: the rate at which the loss has
        risen again, or None. `diverges`: the rate at which the loss is above its starting level or
        not finite, or None.

    Raises:
        TrainingError: The loss did not fall by more than it scatters.
    """
    finite = [(rate, loss) for rate, loss in curve if math.isfinite(loss)]
    reach, smoothed = _reach(finite), smooth(finite)
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
    start = smoothed[min(reach, lowest)] if smoothed else 0.0
    jumps = [
        (end - start_value) ** 2 for (_, start_value), (_, end) in pairwise(finite[: lowest + 1])
    ]
    # Standard error of the difference of two averages; jumps have twice the variance of a loss
    error = math.sqrt(sum(jumps) / max(1, len(jumps)) / (2 * reach + 1))
    fall = start - smoothed[lowest] if smoothed else 0.0
    if fall <= _STANDARD_ERRORS * error:
        message = (
            "the loss did not fall at any learning rate"
            + " by more than it scatters from step to step" * (fall > 0)
        )
        hint = (
            "more --steps, a larger batch_size, a lower --low, a higher --high; or the model "
            "does not learn from these data"
        )
        raise TrainingError(Problem("tune lr", message, hint=hint))
    min_change = max(_MIN_SHARE * fall, _STANDARD_ERRORS * error)
    departure = (
        next(
            steepest_rate
            for steepest_rate in range(lowest, -1, -1)
            if start - smoothed[steepest_rate] <= min_change
        )
        + 1
    )
    windows = [
        (max(0, steepest_rate - reach), min(len(finite) - 1, steepest_rate + reach))
        for steepest_rate in range(departure, lowest + 1)
    ]
    falls = [
        (smoothed[start_value] - smoothed[end]) / math.log(finite[end][0] / finite[start_value][0])
        for start_value, end in windows
    ]
    steepest_rate, lowest_rate = (
        finite[departure + max(range(len(falls)), key=falls.__getitem__)][0],
        finite[lowest][0],
    )
    later_losses = [
        (rate, loss) for (rate, _), loss in zip(finite[lowest:], smoothed[lowest:], strict=True)
    ]
    rises = next(
        (rate for rate, loss in later_losses if loss > smoothed[lowest] + min_change), None
    )
    diverges = next(
        (rate for rate, loss in later_losses if loss > start + min_change),
        curve[-1][0] if len(finite) < len(curve) else None,
    )
    reason = f"the loss falls fastest at {steepest_rate:.2g} and is lowest at {lowest_rate:.2g}"
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
    if steepest_rate > lowest_rate / _MARGIN:
        reason += f"; a third of {lowest_rate:.2g} leaves a margin"
    return {
        "lr": float(f"{min(steepest_rate, lowest_rate / _MARGIN):.2g}"),
        "reason": reason,
        "steepest": steepest_rate,
        "lowest": lowest_rate,
        "rises": rises,
        "diverges": diverges,
    }


def smooth(curve: Sequence[tuple[float, float]]) -> list[float]:
    """Return a centred moving average of the losses."""
    # An average over the past would lag behind the rate
    reach, losses = _reach(curve), [loss for _, loss in curve]
    windows = [losses[max(0, at - reach) : at + reach + 1] for at in range(len(losses))]
    return [sum(window) / len(window) for window in windows]


def _reach(curve: Sequence[tuple[float, float]]) -> int:
    """Return the number of steps to each side to average: `_DECADES` of the rate at most."""
    # A short curve has less room
    return (
        max(1, min(round(_DECADES / math.log10(curve[1][0] / curve[0][0])), len(curve) // 10))
        if len(curve) > 1
        else 1
    )


def draw(
    curve: Sequence[tuple[float, float]], suggestion: dict[str, Any], title: str, file: Path
) -> None:
    """Draw the curve as a PNG."""
    from matplotlib.figure import Figure

    finite = [(rate, loss) for rate, loss in curve if math.isfinite(loss)]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(*zip(*finite, strict=True), s=8, color="#c8c8c8", label="loss of each step")
    smoothed = smooth(finite)
    axes.plot([rate for rate, _ in finite], smoothed, color="#1f77b4", label="smoothed")
    axes.axvline(suggestion["lr"], color="#2ca02c", label=f"suggested: {suggestion['lr']:g}")
    axes.axvline(
        suggestion["lowest"],
        color="#ff7f0e",
        linestyle=":",
        label=f"lowest loss: {suggestion['lowest']:.2g}",
    )
    axes.set_xscale("log")
    low, top = min(smoothed), max(smoothed[: max(1, len(smoothed) // 2)])
    axes.set_ylim(low - 0.1 * (top - low), top + 0.5 * (top - low) or None)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    # matplotlib takes text between dollars for a formula
    axes.set_title(title.replace("$", r"\$"), fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, format="png", dpi=110)
