"""Parse what a sweep varies, in Hydra's syntax.

`a=1,2`, `range(1,5)`, `choice(a,b)`, `glob(*)`, `interval(0,1)`, `tag(log,interval(1e-4,1e-1))`.
`int(interval(1,9))` has whole numbers only, both ends included.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from samewise.runner.config.loader import Loader
from samewise.runner.config.override_text import remove_split_overrides, unreadable
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError, Problem, nearest

SEED = "seed"
"""Key whose values are repeats of one setting."""

# More are a mistake, and would fill the memory before the first run starts
MAX_RUNS = 100_000
"""Maximum number of runs of a sweep."""


@dataclass(frozen=True)
class Interval:
    """Numbers from `low` to `high`.

    Args:
        low: The lowest number.
        high: The highest number.
        log: Whether the scale is logarithmic.
        whole: Whether there are only integers.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> str:
        """Return the number at `share` in [0, 1) of the interval, in override syntax."""
        # A whole number takes the share of all numbers that round to it, also at the ends, as in
        # Optuna
        if self.whole and not self.log:
            return str(
                int(self.low)
                + min(int(share * (self.high - self.low + 1)), int(self.high - self.low))
            )
        if not self.log:
            return repr(self.low + share * (self.high - self.low))
        half = 0.5 if self.whole else 0.0
        low, high = math.log(self.low - half), math.log(self.high + half)
        value = math.exp(low + share * (high - low))
        return (
            str(min(max(round(value), int(self.low)), int(self.high)))
            if self.whole
            else repr(value)
        )


@dataclass(frozen=True)
class Dimension:
    """A key and its possible values.

    Args:
        key: Text before the `=`: `optimizer.lr`, `+optimizer.nesterov`, `experiment`.
        text: Text after it.
        values: Possible values in override syntax; empty if there is an interval.
        interval: Interval of possible numbers; None if there are values.
    """

    key: str
    text: str
    values: tuple[str, ...] = ()
    interval: Interval | None = None

    def at(self, share: float) -> str:
        """Return the value at `share` in [0, 1)."""
        return (
            self.interval.at(share)
            if self.interval
            # The product may round up to the length
            else self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        )

    @property
    def name(self) -> str:
        """The key without `+` or `~`."""
        return self.key.lstrip("+~")


@dataclass(frozen=True)
class Space:
    """Overrides of a sweep.

    Args:
        parts: The overrides in order: text if there is one value, otherwise a dimension.
    """

    parts: tuple[str | Dimension, ...]

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Dimensions without the seed."""
        return tuple(
            part for part in self.parts if isinstance(part, Dimension) and part.key != SEED
        )

    @property
    def seeds(self) -> tuple[str, ...]:
        """Seeds with which each setting is repeated; empty if the seed does not vary."""
        return next(
            (
                part.values
                for part in self.parts
                if isinstance(part, Dimension) and part.key == SEED
            ),
            (),
        )

    @property
    def fixed(self) -> tuple[str, ...]:
        """Overrides with a single value."""
        return tuple(part for part in self.parts if isinstance(part, str))

    def require_dimensions(self) -> None:
        """Require that more than the seed varies, or a sweeper has nothing to choose.

        Raises:
            ConfigError: Only the seed varies.
        """
        ConfigError.raise_if(
            not self.dimensions,
            "sweeper",
            "only the seed varies",
            expected="keys with several values, or an interval",
            hint="sweeper=grid",
        )

    def at(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """Return the overrides of one point in the command line's order.

        Args:
            values: The point's values; dimensions that are missing have no override.
        """
        chosen = [
            part if isinstance(part, str) else f"{part.key}={values[part.key]}"
            for part in self.parts
            if isinstance(part, str) or part.key in values
        ]
        return tuple(chosen)

    def grid(self) -> Iterator[dict[str, str]]:
        """Yield all combinations, the last dimension changing fastest.

        Raises:
            ConfigError: A dimension is an interval, which cannot be listed, or there are too
                many runs.
        """
        intervals = [dimension for dimension in self.dimensions if dimension.interval]
        ConfigError.raise_all(
            Problem(
                x.name,
                "an interval has infinitely many values, which a grid cannot list",
                x.text,
                "values",
                "give values, or choose sweeper=random, sobol or optuna",
            )
            for x in intervals
        )
        count = math.prod(len(dimension.values) for dimension in self.dimensions) * max(
            len(self.seeds), 1
        )
        ConfigError.raise_if(
            count > MAX_RUNS,
            "sweeper",
            f"a grid of {count} runs is too large",
            expected=f"at most {MAX_RUNS}",
            hint="sweeper=random sweeper.trials=100",
        )
        for values in itertools.product(*(dimension.values for dimension in self.dimensions)):
            yield dict(zip((dimension.key for dimension in self.dimensions), values, strict=True))


def read_space(overrides: Sequence[str], *, project: Project) -> Space:
    """Parse the overrides of a sweep.

    Args:
        overrides: Overrides as on the command line.
        project: The user's project, whose groups `glob` chooses from.

    Raises:
        ConfigError: An override cannot be read, or has no values.
    """
    groups, parser = Loader(project).groups(), OverridesParser.create()
    parts, parsed_overrides = list[str | Dimension](), list[Override]()
    overrides, problems = remove_split_overrides(overrides)
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
            parsed_overrides.append(override)
            parts.append(_part(override, text, parser, groups))
        except (HydraException, ValueError) as error:
            problems.append(unreadable(text, error))
        except ConfigError as error:
            problems += error.problems
    problems += _repeated_keys(parsed_overrides)
    problems += [
        _shared_setting(part)
        for part in parts
        if isinstance(part, Dimension) and part.name.partition(".")[0] in ("sweeper", "launcher")
    ]
    ConfigError.raise_all(problems)
    return Space(tuple(parts))


def _shared_setting(part: Dimension) -> Problem:
    """Return the problem with several sweepers or launchers, or several values of their keys."""
    return Problem(
        part.name,
        "cannot vary: it is the same for all points of a sweep",
        part.text,
        "one value",
        "run the command once with each; finished runs are not trained again"
        if part.name.startswith("sweeper")
        else "",
    )


def _repeated_keys(overrides: Sequence[Override]) -> list[Problem]:
    """Return a problem for each key that varies and is set once more."""
    problems = dict[str, Problem]()
    for position, later in enumerate(overrides):
        # The points' names would show other values. One value before several is no problem, as it
        # is replaced
        for earlier in overrides[:position]:
            if earlier.is_sweep_override() and earlier.key_or_group == later.key_or_group:
                message = (
                    "varies twice" if later.is_sweep_override() else "varies, and is set once more"
                )
                problems[earlier.key_or_group] = Problem(
                    earlier.key_or_group,
                    message,
                    str(later.input_line),
                    "one override for each key that varies",
                )
    return list(problems.values())


def _part(
    override: Override, text: str, parser: OverridesParser, groups: Mapping[str, Sequence[str]]
) -> str | Dimension:
    """Parse an override that has one value to text, otherwise to a dimension."""
    if not override.is_sweep_override():
        return text
    key, value_text = (
        SEED
        if override.key_or_group == SEED and not override.is_add()
        else override.get_key_element(),
        text.partition("=")[2],
    )
    value: Any = override.value()
    ConfigError.raise_all(
        Problem(key, "there is no such tag", tag, "log", nearest(tag, ["log"]))
        for tag in sorted({*getattr(value, "tags", ())} - {"log"})
    )
    if isinstance(value, IntervalSweep):
        return Dimension(key, value_text, interval=_interval(key, value, value_text))
    ConfigError.raise_if(
        isinstance(value, RangeSweep)
        and value.step
        and abs((value.stop or 0) - (value.start or 0)) / abs(value.step) > MAX_RUNS,
        key,
        "has too many values",
        value_text,
        f"at most {MAX_RUNS}",
    )
    random_state = random.getstate()
    # For `shuffle(...)`: the same command gives the same order
    random.seed(text)
    try:
        texts = (
            value.filter(list(groups.get(override.key_or_group, ())))
            if isinstance(value, Glob)
            else override.sweep_string_iterator()
        )
        # A value that is listed twice would be two points with one run
        values = tuple(dict.fromkeys(texts))
    finally:
        random.setstate(random_state)
    ConfigError.raise_if(
        not values and isinstance(value, RangeSweep),
        key,
        "is an empty range",
        value_text,
        "range(FIRST, END), with END greater than FIRST, or range(NUMBER)",
    )
    ConfigError.raise_if(
        not values,
        key,
        "no such choice",
        value_text,
        hint=f"`samewise list {key}` shows the choices",
    )
    return Dimension(key, value_text, values)


def _interval(key: str, sweep: IntervalSweep, text: str) -> Interval:
    """Return the checked interval of a key."""
    low, high, log = sweep.start, sweep.end, "log" in sweep.tags
    assert low is not None
    assert high is not None
    ConfigError.raise_if(
        not low < high, key, "is an empty interval", text, "interval(LOWEST, HIGHEST)"
    )
    ConfigError.raise_if(
        log and low <= 0,
        key,
        "a logarithmic scale must start above 0",
        text,
        "a lowest value above 0",
    )
    ConfigError.raise_if(
        key == SEED, key, "seeds are repeats, so they must be listed", text, "seed=range(5)"
    )
    return Interval(low, high, log=log, whole=isinstance(low, int) and isinstance(high, int))
