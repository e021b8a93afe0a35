"""Define the interface of sweepers, which choose the settings to try.

A sweeper is a choice of the group `sweeper`; a project's own sweeper belongs in its own package.
"""

import abc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samewise.runner.sweepers.space import Space


@dataclass(frozen=True)
class Setting:
    """A value for each dimension. With each seed, a setting is one run.

    Args:
        number: The setting's number in the sweep.
        values: Values by key, in override syntax.
    """

    number: int
    values: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """Result of a setting after all its seeds have ended.

    Args:
        state: "finished"; "pruned" if a run was stopped as unpromising; "failed" if any run failed.
        metrics: Means over the seeds, at the step that was best by `evaluate.monitor` and, with the
            prefix `final/`, at the last step. Empty if there are none.
    """

    state: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Sweeper(abc.ABC):
    """Chooses what to try next. Called only in the process that runs the sweep."""

    listed: bool = True
    """Whether all settings are known before any is tried.

    Only such a sweep can be submitted to a cluster all at once.
    """

    @abc.abstractmethod
    def open(self, space: Space, folder: Path, *, monitor: str, mode: str) -> None:
        """Start, or resume.

        Args:
            space: Dimensions to vary.
            folder: The sweep's folder, for the sweeper's own files.
            monitor: `evaluate.monitor` of the experiments, the objective unless the sweeper's
                config has its own.
            mode: Which value is better: `min` or `max`.

        Raises:
            ConfigError: This sweeper cannot search the space.
        """

    @abc.abstractmethod
    def settings(self) -> Iterable[Setting]:
        """Return all settings in the order of trying.

        A sweeper that is not `listed` returns the settings that it has chosen so far.
        """

    def count(self) -> int | None:
        """Return the number of settings; None if unknown."""
        return len(list(self.settings())) if self.listed else None

    def ask(self) -> Setting | None:
        """Return the next setting to try; None if there is none now.

        Called only if the sweeper is not `listed`.
        """
        return None

    def tell(self, setting: Setting, result: Result) -> None:
        """Process the result of a setting.

        Called only if the sweeper is not `listed`. A resumed sweep repeats earlier results.

        Args:
            setting: The setting.
            result: Its result, over all seeds.
        """

    def variables(self, setting: Setting, seed: int) -> Mapping[str, str]:
        """Return environment variables with which a run reports during training; none by default.

        `processes.this_process.REPORTER` is one. Their names begin with SAMEWISE_.

        Args:
            setting: The run's setting.
            seed: Number of the run's seed, from 0.
        """
        return {}

    def close(self) -> None:
        """Release resources; the sweep ends or is interrupted."""
