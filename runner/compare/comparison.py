"""Compare settings with a baseline by pairs of runs, and train the pairs that are missing.

RUN_ROOT/comparisons/STUDY.json   the looks at two settings' difference by a metric
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samewise.runner.compare.sides import FOLDER, Place, Side, find_side, find_sides
from samewise.runner.config.monitors import mode_of
from samewise.runner.errors import ConfigError, TrainingError, nearest, number_of
from samewise.runner.paired import (
    LEVEL,
    Estimate,
    add_look,
    estimate,
    holm_levels,
    is_share,
    pairs_needed,
)
from samewise.runner.records.files import parse_json, read_lines, read_mapping, write_json

FEWEST, MOST = 3, 20
"""Pairs at the first look and at the last, if training goes on until a difference is settled."""
COSTS = ("seconds", "steps")
_LOOKS = {"looks": [{"pairs": int, "spent": float}]}


@dataclass(frozen=True)
class PairedComparison:
    """A setting compared with a baseline by one metric.

    Args:
        first: Name of the setting.
        second: Name of the baseline.
        metric: The metric.
        mode: Whether the least or the most of it is better: min or max.
        seeds: The seeds of the pairs, in order.
        values: The two values of each pair.
        estimate: The mean gain in the metric's unit, above zero if the setting is better, with its
            interval, effect size and p-value.
        more: Number of further pairs that would settle it, with a chance of 80 %; None: it is
            settled, or they are more than 1000.
        margin: Gains within plus and minus this do not matter; 0: all do.
        notes: What the pairs share by their traces, and what is left out, as sentences.
    """

    first: str
    second: str
    metric: str
    mode: str
    seeds: Sequence[int]
    values: Sequence[tuple[float, float]]
    estimate: Estimate
    more: int | None = None
    margin: float = 0.0
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """Return `better`, `worse`, `the same` or `not distinguishable`."""
        now = self.estimate
        if now.sign:
            return "better" if now.sign > 0 else "worse"
        is_same = now.low == now.high or max(-now.low, now.high) <= self.margin
        return "the same" if is_same else "not distinguishable"

    @property
    def unit(self) -> str:
        """Return `points`, of which a share has 100; "" for other metrics."""
        return "points" if is_share(self.metric) else ""

    def show(self, value: float) -> str:
        """Format a value in the comparison's unit, with as many digits as its interval tells."""
        scale, now = 100.0 if self.unit else 1.0, self.estimate
        width = now.high - now.low if now.pairs > 1 else abs(now.mean)
        digits = 1 - math.floor(math.log10(scale * width / 2)) if width else 3
        return f"{scale * value:.{max(0, digits)}f}"

    def __str__(self) -> str:
        """Return the result as a sentence."""
        now, count = self.estimate, number_of(self.estimate.pairs, "pair")
        if now.low == now.high:
            return f"{self.metric}: {self.first} and {self.second} have equal values in {count}"

        def gain(value: float, unit: str = "") -> str:
            size = f"{self.show(abs(value))} {unit}".strip()
            return f"{size} {'better' if value >= 0 else 'worse'}"

        ends = [gain(now.low), gain(now.high)]
        if now.sign:
            ends = sorted((self.show(abs(x)) for x in (now.low, now.high)), key=float)
        interval = f", 95 % interval {' to '.join(ends)}" if now.pairs > 1 else ""
        outcome = {
            "not distinguishable": "; not distinguishable: "
            + (
                f"about {self.more} more would settle it"
                if self.more
                else "one pair tells nothing"
                if now.pairs == 1
                else "1000 more would not settle it"
            ),
            "the same": f"; the same to within {self.show(self.margin)}",
        }.get(self.verdict, "")
        text = f"{self.first} is {gain(now.mean, self.unit)} than {self.second}"
        return f"{self.metric}: {text}{interval}, from {count}{outcome}"


def compare(
    first: str,
    second: str,
    place: Place,
    *,
    metrics: Sequence[str] = (),
    seeds: int | None = None,
    until: float | None = None,
    budget: int | None = None,
) -> list[PairedComparison]:
    """Compare settings with a baseline, by pairs of finished runs with the same seed.

    Args:
        first: Name of the settings, as `sides.find_sides` takes it. All hold together by each
            metric (Holm).
        second: Name of the baseline.
        place: Where the runs are.
        metrics: Metrics, `final/...` for those at the last step, `seconds` or `steps`; (): the
            baseline's `evaluate.monitor`.
        seeds: Number of pairs: what is missing is trained. None: nothing, without `until` or
            `budget`.
        until: Train pairs until the difference by the first metric is settled, or its interval is
            within plus and minus this, in points for a share; at most `seeds` of them, or 20.
        budget: Optimizer steps that may be trained, of all runs together; None: any number.

    Raises:
        ConfigError: There are no such settings or no pairs, or a run lacks a metric.
    """
    baseline = find_side(second, place)
    sides = [x for x in find_sides(first, place) if x.key != baseline.key]
    ConfigError.raise_if(
        not sides, first, f"is the same setting as {second}", expected="another setting"
    )
    results = list[PairedComparison]()
    for metric in dict.fromkeys(metrics or [str(baseline.config.cfg.evaluate.monitor)]):
        studies = [Study(side, baseline, metric) for side in sides]
        # The first metric decides how long to train
        if not results and (seeds or until is not None or budget is not None):
            for study in studies:
                budget = study.train(seeds or MOST, until, budget, LEVEL / len(studies))
        for study in studies:
            study.read()
            study.look()
        levels = holm_levels([study.estimate().p for study in studies])
        results += [
            x.compare(level, until or 0.0) for x, level in zip(studies, levels, strict=True)
        ]
    return results


class Study:
    """Two settings compared by one metric, and the looks at them.

    Args:
        first: The setting.
        second: The baseline.
        metric: The metric.
    """

    def __init__(self, first: Side, second: Side, metric: str) -> None:
        self.sides, self.metric, settings = (first, second), metric, second.config.cfg.evaluate
        modes = {**(settings.also or {}), settings.monitor: settings.mode.value}
        name = metric.removeprefix("final/")
        self.mode = "min" if metric in COSTS else str(modes.get(name) or mode_of(name) or "")
        ConfigError.raise_if(
            not self.mode,
            "--metric",
            "its name does not tell whether less or more is better",
            metric,
            hint=f"train with 'evaluate.also={{{name}: max}}'",
        )
        text = "\n\n".join([*sorted((first.key, second.key)), metric])
        study = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file = second.place.run_root / FOLDER / f"{study}.json"
        recorded = read_mapping(self.file, _LOOKS).get("looks", ())
        self.looks = tuple((look["pairs"], look["spent"]) for look in recorded)
        self.plan = self.looks[-1] if self.looks else (0, 0.0)

    def read(self) -> int:
        """Read the runs' values, and return the number of pairs.

        Raises:
            ConfigError: A run lacks the metric.
        """
        runs = [side.values() for side in self.sides]
        self.unpaired = sorted({*runs[0]} ^ {*runs[1]})
        self.seeds = [seed for seed in runs[0] if seed in runs[1]]
        for side, values in zip(self.sides, runs, strict=True):
            for seed in self.seeds:
                ConfigError.raise_if(
                    self.metric not in values[seed],
                    "--metric",
                    f"{side.name} with seed {seed} has no such metric at its best step",
                    self.metric,
                    hint="`samewise eval RUN --split test` adds those of the test split"
                    if self.metric.startswith("test/")
                    else nearest(self.metric, values[seed]),
                )
        pairs = {x: (runs[0][x][self.metric], runs[1][x][self.metric]) for x in self.seeds}
        self.values = {x: pair for x, pair in pairs.items() if all(map(math.isfinite, pair))}
        return len(self.seeds)

    def look(self, last: int = 0) -> None:
        """Look at the present pairs, on the way to `last` of them, and record it.

        Raises:
            ConfigError: There are none.
        """
        ConfigError.raise_if(
            not self.values,
            self.metric,
            f"{self.sides[0].name} and {self.sides[1].name} have no finished runs with one seed",
            hint="--seeds 5 trains what is missing",
        )
        self.looks = add_look(self.looks, len(self.values), self.plan, last)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            looks = [{"pairs": pairs, "spent": spent} for pairs, spent in self.looks]
            write_json(self.file, {"looks": looks})
        except (OSError, TrainingError) as error:
            print(f"warning: this look is not recorded for later ones: {error}", file=sys.stderr)

    def estimate(self, level: float = LEVEL) -> Estimate:
        """Estimate the first side's gain at the last look."""
        sign = 1.0 if self.mode == "max" else -1.0
        is_bounded = is_share(self.metric) or self.metric in COSTS
        ends = (
            sign * (0.0 if is_bounded else -math.inf),
            sign * (1.0 if is_share(self.metric) else math.inf),
        )
        first, second = ([sign * pair[x] for pair in self.values.values()] for x in (0, 1))
        return estimate(first, second, self.looks, level=level, bounds=(min(ends), max(ends)))

    def train(self, most: int, until: float | None, budget: int | None, level: float) -> int | None:
        """Train pairs until there are `most`, or the difference is settled.

        Returns:
            What is left of the budget.
        """
        while (count := self.read()) < most:
            seeds = itertools.count(max(self.seeds, default=-1) + 1)
            # First those that a side has
            new = [
                *self.unpaired,
                *(x for x in itertools.islice(seeds, most) if x not in self.unpaired),
            ]
            size = most - count if until is None and budget is None else max(1, FEWEST - count)
            for side in reversed(self.sides):
                values = side.values()
                missing = [seed for seed in new[: min(size, most - count)] if seed not in values]
                steps = max([x["steps"] for x in values.values()], default=0) * len(missing)
                if budget is not None and steps > budget:
                    return budget
                if missing:
                    side.train(missing)
                    steps = sum(side.values()[seed]["steps"] for seed in missing)
                    budget = None if budget is None else budget - int(steps)
            if until is not None and self.read() < most:
                self.look(most)
                now, scale = self.estimate(level), 100 if is_share(self.metric) else 1
                if now.sign or scale * (now.high - now.low) / 2 <= until:
                    break
        return budget

    def compare(self, level: float, margin: float) -> PairedComparison:
        """Return the result at a level."""
        now = self.estimate(level)
        left_out = [str(x) for x in self.seeds if x not in self.values]
        notes = {
            describe_shared(self.sides, list(self.values)): True,
            f"without a pair: seed {', '.join(map(str, self.unpaired))}": self.unpaired,
            f"left out, as a value is not finite: seed {', '.join(left_out)}": left_out,
        }
        return PairedComparison(
            self.sides[0].name,
            self.sides[1].name,
            self.metric,
            self.mode,
            list(self.values),
            list(self.values.values()),
            now,
            None if now.sign else pairs_needed(now, self.looks, level),
            margin / 100 if is_share(self.metric) else margin,
            [note for note, is_there in notes.items() if note and is_there],
        )


def describe_shared(sides: Sequence[Side], seeds: Sequence[int]) -> str:
    """Return what pairs have in common by their traces; "" without traces.

    Args:
        sides: Both sides.
        seeds: Seeds of the pairs.
    """
    folders = [side.folders() for side in sides]
    pairs = [[_start(x[seed].trace) for x in folders if seed in x] for seed in seeds]
    starts = [pair for pair in pairs if len(pair) == 2 and all(pair)]
    same = Counter[str](name for a, b in starts for name in a if a[name] == b.get(name))
    common = sum(name in b for a, b in starts for name in a) - 2 * len(starts)
    batches, inputs = same.pop("batch", 0), same.pop("input", 0)
    return (
        f"of {len(starts)} pairs, {batches} have the same first batch, and {inputs} the same "
        f"augmentation of it; {same.total()} of {common} initial tensors are the same"
        if starts
        else ""
    )


def _start(file: Path) -> Mapping[str, str]:
    """Return the digests of a run's first batch, its input and the initial tensors, by name."""
    head, line = [*(parse_json(x) for _, x in itertools.islice(read_lines(file), 2)), {}, {}][:2]
    if line.get("step") != 1 or "initial" not in head:
        return {}
    digests = re.findall(r".{16}", head["initial"]["weights"])
    return {
        **dict(zip(head["weights"], digests, strict=False)),
        **{name: line[name] for name in ("batch", "input")},
    }
