"""The interface of sweepers, which choose the settings to try.

A sweeper is a choice of the group `sweeper`; a project's own belongs in its own package.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samewise.runner.sweepers.space import Space


@dataclass(frozen=True)
class Setting:
    """A value for each dimension, in override syntax; with each seed it is one run."""

    number: int
    values: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """The result of a setting after all its seeds have ended.

    Args:
        state: "finished"; "pruned" if a run was stopped as unpromising; "failed" if any run failed.
        metrics: Means over its seeds of the metrics at the step that was best by
            `evaluate.monitor`, and with the prefix `final/` of the last; empty where there are
            none.
    """

    state: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Sweeper(abc.ABC):
    """Chooses what to try next. Called only in the process that runs the sweep."""

    listed: bool = True
    """Whether all settings are known before any is tried; only such a sweep can be handed over
    whole to a cluster."""

    @abc.abstractmethod
    def open(self, space: Space, folder: Path, *, monitor: str, mode: str) -> None:
        """Start, or resume.

        Args:
            space: What varies.
            folder: The sweep's, for the sweeper's own files.
            monitor: `evaluate.monitor` of the experiments, which defines "better" unless the
                sweeper's config does.
            mode: `min` or `max`.

        Raises:
            ConfigError: this sweeper cannot search the space.
        """

    @abc.abstractmethod
    def settings(self) -> Iterable[Setting]:
        """All settings in the order of trying.

        If the sweeper is not `listed`, those returned so far.
        """

    def count(self) -> int | None:
        """The number of settings; None if unknown."""
        return len(list(self.settings())) if self.listed else None

    def ask(self) -> Setting | None:
        """The next setting to try.

        None if there is none now. Only for sweepers that are not `listed`.
        """
        return None

    def tell(self, setting: Setting, result: Result) -> None:
        """Process the result of a setting.

        On resume, earlier results again. Only for sweepers that are not `listed`.
        """

    def variables(self, setting: Setting, seed: int) -> Mapping[str, str]:
        """Environment variables with which the run of a setting's `seed`-th seed can report during
        training: `processes.this_process.REPORTER`.

        Their names begin with SAMEWISE_. Default: none.
        """
        return {}

    def close(self) -> None:
        """The sweep ends, or is left."""
