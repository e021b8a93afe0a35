"""Let Optuna 5 choose settings by earlier results, one at a time when there is room.

The study is a journal in the sweep's folder. A setting's number is its trial's.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.processes.this_process import REPORTER
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.sweepers import optuna_study
from samewise.runner.sweepers.base import Result, Setting, Sweeper
from samewise.runner.sweepers.optuna_study import optuna
from samewise.runner.sweepers.space import Dimension, Space

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

# A finished trial cannot be changed, so a repeated one is added
_REPEATED_TRIAL = "samewise.repeats"
"""Attribute of a trial that holds the result of a failed trial that was run again."""


@final
class Optuna(Sweeper):
    """Asks Optuna for settings.

    Args:
        sampler: Sampler of Optuna: tpe (Bergstra et al., NeurIPS 2011), gp (Gaussian processes),
            cmaes (Hansen and Ostermeier 2001), nsgaii (Deb et al. 2002), or random.
        trials: Number of settings.
        seed: Seed of the sampler's draws.
        objectives: Metrics, each with min or max; null: the experiments' `evaluate.monitor`. A
            metric is taken at the step that was best by `evaluate.monitor`; with `final/` before
            its name, at the last step.
        pruner: Pruner that stops unpromising trials: median, successive_halving (Li et al. 2018),
            hyperband (Li et al., JMLR 2018); null: none.
        sampler_options: Further arguments of Optuna's sampler.
        pruner_options: Arguments of Optuna's pruner; its steps are evaluations, counted from 1.

    Raises:
        ConfigError: A value is not valid, or does not go with the others.
    """

    listed = False

    def __init__(
        self,
        *,
        sampler: str = "tpe",
        trials: int = 20,
        seed: int = 0,
        objectives: Mapping[str, str] | None = None,
        pruner: str | None = None,
        sampler_options: Mapping[str, Any] | None = None,
        pruner_options: Mapping[str, Any] | None = None,
    ) -> None:
        ConfigError.raise_if(trials < 1, "trials", "is too small", trials, "at least 1")
        wrong_modes = {
            name: mode for name, mode in (objectives or {}).items() if mode not in ("min", "max")
        }
        ConfigError.raise_all(
            Problem(f"objectives.{name}", "is not a valid direction", mode, "min or max")
            for name, mode in wrong_modes.items()
        )
        ConfigError.raise_if(
            len(objectives or {}) > 1 and pruner,
            "pruner",
            "trials with several objectives cannot be pruned",
            pruner,
            "null",
        )
        ConfigError.raise_if(
            len(objectives or {}) > 1 and sampler == "cmaes",
            "sampler",
            "CMA-ES supports only one objective",
            list(objectives or {}),
            "nsgaii, tpe or gp",
        )
        self._name, self._trials, self._seed = sampler, trials, seed
        self._objectives = dict(objectives or {})
        self._sampler_options, self._pruner_options = (
            dict(sampler_options or {}),
            dict(pruner_options or {}),
        )
        self._pruner = pruner
        optuna_study.sampler(sampler, self._sampler_options, seed=seed)
        optuna_study.pruner(pruner, self._pruner_options)
        self._unrecorded_trials = deque[int]()

    def open(self, space: Space, folder: Path, *, monitor: str, mode: str) -> None:
        """Check the space, and write nothing: another process may be running the sweep."""
        space.require_dimensions()
        ConfigError.raise_if(
            self._name == "cmaes"
            and sum(dimension.interval is not None for dimension in space.dimensions) < 2,
            "sweeper",
            "CMA-ES needs at least two intervals",
            expected="key=interval(LOWEST,HIGHEST)",
            hint="sweeper=tpe",
        )
        self._space, self._folder = space, SweepFolder(folder.absolute())
        # The study keeps directions by place, and the same sweep may list its objectives in another
        # order
        self._objectives = dict(sorted((self._objectives or {monitor: mode}).items()))

    def settings(self) -> Iterable[Setting]:
        return [Setting(trial.number, {}) for trial in self._own_trials()]

    def count(self) -> int | None:
        return self._trials

    def ask(self) -> Setting | None:
        study = self._study
        # A crash between asking for a trial and writing its points leaves a trial without points
        if self._unrecorded_trials:
            number = self._unrecorded_trials.popleft()
            study.sampler = self._sampler(number)
            trial = optuna.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)  # pyright: ignore[reportPrivateUsage]
        elif len(self._own_trials()) < self._trials:
            study.sampler = self._sampler(len(study.get_trials(deepcopy=False)))
            trial = study.ask()
        else:
            return None
        values = {dimension.key: _suggest(trial, dimension) for dimension in self._space.dimensions}
        # Before the point is written: a point always has its trial
        optuna_study.make_durable(self._folder.path)
        return Setting(trial.number, values)

    def tell(self, setting: Setting, result: Result) -> None:
        trial = self._study.get_trials(deepcopy=False)[setting.number]
        values = self._values(result) if result.state == "finished" else None
        if trial.state.is_finished():
            if trial.state is optuna.trial.TrialState.FAIL and values is not None:
                self._add_repeat(trial, values)
        elif values is not None:
            self._study.tell(trial.number, values)
        else:
            self._study.tell(
                trial.number,
                state=optuna.trial.TrialState.PRUNED
                if result.state == "pruned"
                else optuna.trial.TrialState.FAIL,
            )

    def variables(self, setting: Setting, seed: int) -> Mapping[str, str]:
        """Return the first seed's reporter if trials are pruned."""
        if self._pruner is None or seed:
            return {}
        (metric,) = self._objectives
        reporter = {
            "_target_": "samewise.runner.sweepers.optuna_reporter.Reporter",
            "folder": str(self._folder.path),
            "trial": setting.number,
            "metric": metric.removeprefix("final/"),
            "pruner": self._pruner,
            "pruner_options": self._pruner_options,
        }
        return {REPORTER: json.dumps(reporter)}

    @functools.cached_property
    def _study(self) -> optuna.Study:
        """The study, opened on first use by the process that runs the sweep."""
        if self._name == "gp":
            import torch

            # Leave the cores to the jobs
            torch.set_num_threads(1)
        pruner = optuna_study.pruner(self._pruner, self._pruner_options)
        study = optuna_study.open_study(
            self._folder.path, self._objectives, sampler=self._sampler(0), pruner=pruner
        )
        recorded_trials = {point.setting for point in self._folder.points()}
        trials = study.get_trials(deepcopy=False)
        self._unrecorded_trials.extend(
            trial.number
            for trial in trials
            if trial.state is optuna.trial.TrialState.RUNNING
            and trial.number not in recorded_trials
        )
        return study

    def _own_trials(self) -> list[FrozenTrial]:
        """Return the trials that are settings of the sweep, without repeated ones."""
        return [
            trial
            for trial in self._study.get_trials(deepcopy=False)
            if _REPEATED_TRIAL not in trial.user_attrs
        ]

    def _sampler(self, number: int) -> Any:
        """Return a new sampler for a trial, keyed by its number."""
        # A sampler that started over after a restart would repeat the first settings
        digest = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=4).digest()
        return optuna_study.sampler(
            self._name, self._sampler_options, seed=int.from_bytes(digest, "big")
        )

    def _values(self, result: Result) -> list[float] | None:
        """Return the objectives' values; None if one is NaN.

        Raises:
            ConfigError: The runs lack an objective.
        """
        missing = [name for name in self._objectives if name not in result.metrics]
        ConfigError.raise_all(
            Problem(
                "sweeper.objectives",
                "the runs do not have this metric",
                name,
                hint=nearest(name, sorted(result.metrics)),
            )
            for name in missing
        )
        values = [result.metrics[name] for name in self._objectives]
        return None if any(math.isnan(value) for value in values) else values

    def _add_repeat(self, failed: FrozenTrial, values: list[float]) -> None:
        """Add a trial with the result of a failed one that was run again."""
        if not any(
            trial.user_attrs.get(_REPEATED_TRIAL) == failed.number
            for trial in self._study.get_trials(deepcopy=False)
        ):
            repeat = optuna.create_trial(
                params=failed.params,
                distributions=failed.distributions,
                values=values,
                user_attrs={_REPEATED_TRIAL: failed.number},
            )
            self._study.add_trial(repeat)


def _suggest(trial: optuna.Trial, dimension: Dimension) -> str:
    """Return a trial's value for a dimension, in override syntax; an existing value stays."""
    interval = dimension.interval
    if interval is None:
        return str(trial.suggest_categorical(dimension.key, list(dimension.values)))
    if interval.whole:
        return str(
            trial.suggest_int(
                dimension.key, int(interval.low), int(interval.high), log=interval.log
            )
        )
    return repr(
        float(trial.suggest_float(dimension.key, interval.low, interval.high, log=interval.log))
    )
