"""Which settings a sweep tries. A sweeper is a choice of the group `sweeper`; a project's own goes in a package of its own."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samewise.runner.sweepers.space import Space


@dataclass(frozen=True)
class Setting:
    """A value for each dimension, as an override writes it; with each seed it is one run."""

    number: int
    values: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """What became of a setting, when all of its seeds have ended.

    Args:
        state: "finished"; "pruned", where a run was stopped as unpromising; "failed", where any run failed.
        metrics: Means over its seeds of the metrics at the step that was best by `evaluate.monitor`, and with the prefix `final/` of the last; empty where
            there are none.
    """

    state: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Sweeper(abc.ABC):
    """Says what to try next. It is asked in one process, the one that runs the sweep."""

    listed: bool = True
    """Whether all settings are known before any is tried; only such a sweep can be handed over whole to a cluster."""

    @abc.abstractmethod
    def open(self, space: Space, folder: Path, *, monitor: str, mode: str) -> None:
        """Begin, or go on.

        Args:
            space: What varies.
            folder: The sweep's, for what the sweeper has to remember.
            monitor: `evaluate.monitor` of the experiments, what "better" means where the sweeper's config does not say.
            mode: `min` or `max`.

        Raises:
            ConfigError: this sweeper cannot search the space.
        """

    @abc.abstractmethod
    def settings(self) -> Iterable[Setting]:
        """All settings, in the order of trying; those asked for so far, where the sweeper is not `listed`."""

    def count(self) -> int | None:
        """How many settings there will be; None where that is not known."""
        return len(list(self.settings())) if self.listed else None

    def ask(self) -> Setting | None:
        """The next setting to try; None if there is none for now. Called on sweepers that are not `listed`."""
        return None

    def tell(self, setting: Setting, result: Result) -> None:
        """Take the result of a setting; when the sweep resumes, also those of earlier ones again. Called on sweepers that are not `listed`."""

    def variables(self, setting: Setting, seed: int) -> Mapping[str, str]:
        """Environment variables for the run of a setting with its `seed`-th seed, by which it may report while it trains: `processes.this_process.REPORTER`.

        Their names begin with SAMEWISE_. Default: none.
        """
        return {}

    def close(self) -> None:
        """The sweep ends, or is left."""
