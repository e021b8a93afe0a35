"""Settings chosen by Optuna 5 from earlier results: one at a time when there is room.

The study is a journal in the sweep's folder.

A setting's number is its trial's. The study may be left at any moment: a trial that was asked for
and never written down as a point is the first that is given out again, and one that was written
down and not told is told when the sweep goes on.
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

from samewise.runner.config import compose
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.processes.this_process import REPORTER
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.sweepers import optuna_study
from samewise.runner.sweepers.base import Result, Setting, Sweeper
from samewise.runner.sweepers.optuna_study import optuna
from samewise.runner.sweepers.space import Dimension, Space
from samewise.runner.tracking import journal

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_REPEATS = "samewise.repeats"
"""An attribute of a trial that holds the result of one that had failed and was run again: a
finished trial cannot be changed."""


@final
class Optuna(Sweeper):
    """Asks Optuna for settings.

    Args:
        sampler: tpe (Bergstra et al., NeurIPS 2011), gp (Gaussian processes), cmaes (Hansen and
            Ostermeier 2001), nsgaii (Deb et al. 2002), or random.
        trials: How many settings.
        seed: The key of the sampler's draws.
        objectives: Metrics, each with min or max; null: the experiments' `evaluate.monitor`. A
            metric is taken at the step that was best by `evaluate.monitor`; with `final/` before
            its name, at the last one.
        pruner: What stops trials that promise little: median, successive_halving (Li et al. 2018),
            hyperband (Li et al., JMLR 2018); null: nothing.
        sampler_options: Further arguments of Optuna's sampler.
        pruner_options: Arguments of Optuna's pruner; its steps are evaluations, counted from 1.
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
        if trials < 1:
            raise ConfigError(Problem("trials", "is too small", trials, "at least 1"))
        wrong = {
            name: mode for name, mode in (objectives or {}).items() if mode not in ("min", "max")
        }
        if wrong:
            raise ConfigError(
                *(
                    Problem(f"objectives.{name}", "is not a valid direction", mode, "min or max")
                    for name, mode in wrong.items()
                )
            )
        if len(objectives or {}) > 1 and pruner:
            raise ConfigError(
                Problem("pruner", "trials with several objectives cannot be pruned", pruner, "null")
            )
        if len(objectives or {}) > 1 and sampler == "cmaes":
            raise ConfigError(
                Problem(
                    "sampler",
                    "CMA-ES supports only one objective",
                    list(objectives or {}),
                    "nsgaii, tpe or gp",
                )
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
        self._orphans = deque[int]()

    def open(self, space: Space, folder: Path, *, monitor: str, mode: str) -> None:
        """Writes nothing: another process may be running the sweep."""
        space.require_dimensions()
        if (
            self._name == "cmaes"
            and sum(dimension.interval is not None for dimension in space.dimensions) < 2
        ):
            raise ConfigError(
                Problem(
                    "sweeper",
                    "CMA-ES needs at least two intervals",
                    expected="key=interval(LOWEST,HIGHEST)",
                    hint="sweeper=tpe",
                )
            )
        self._space, self._folder = space, SweepFolder(folder.absolute())
        self._objectives = dict(sorted((self._objectives or {monitor: mode}).items()))

    def settings(self) -> Iterable[Setting]:
        return [Setting(trial.number, {}) for trial in self._own_trials()]

    def count(self) -> int | None:
        return self._trials

    def ask(self) -> Setting | None:
        study = self._study
        if self._orphans:
            number = self._orphans.popleft()
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
                self._tell_again(trial, values)
        elif values is not None:
            self._report_logged(trial)
            self._study.tell(trial.number, values)
        else:
            self._study.tell(
                trial.number,
                state=optuna.trial.TrialState.PRUNED
                if result.state == "pruned"
                else optuna.trial.TrialState.FAIL,
            )

    def variables(self, setting: Setting, seed: int) -> Mapping[str, str]:
        """If trials are pruned, the first seed's run reports."""
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
        """Opened on first use, by the process that runs the sweep."""
        if self._name == "gp":
            import torch

            torch.set_num_threads(1)  # leave the cores to the jobs
        pruner = optuna_study.pruner(self._pruner, self._pruner_options)
        study = optuna_study.open_study(
            self._folder.path, self._objectives, sampler=self._sampler(0), pruner=pruner
        )
        recorded_trials = {point.setting for point in self._folder.points()}
        trials = study.get_trials(deepcopy=False)
        self._orphans.extend(
            trial.number
            for trial in trials
            if trial.state is optuna.trial.TrialState.RUNNING
            and trial.number not in recorded_trials
        )
        return study

    def _own_trials(self) -> list[FrozenTrial]:
        return [
            trial
            for trial in self._study.get_trials(deepcopy=False)
            if _REPEATS not in trial.user_attrs
        ]

    def _sampler(self, number: int) -> Any:
        """A new sampler per trial, keyed by its number: one that started over after a restart would
        repeat the first settings.
        """
        digest = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=4).digest()
        return optuna_study.sampler(
            self._name, self._sampler_options, seed=int.from_bytes(digest, "big")
        )

    def _values(self, result: Result) -> list[float] | None:
        """The objectives' values; None if one is not a number."""
        missing = [name for name in self._objectives if name not in result.metrics]
        if missing:
            raise ConfigError(
                *(
                    Problem(
                        "sweeper.objectives",
                        "the runs do not have this metric",
                        name,
                        hint=nearest(name, sorted(result.metrics)),
                    )
                    for name in missing
                )
            )
        values = [result.metrics[name] for name in self._objectives]
        return None if any(math.isnan(value) for value in values) else values

    def _report_logged(self, trial: FrozenTrial) -> None:
        """Report the evaluations of a run that finished outside of the sweep, and reported none.

        Whatever the pruner says, it counts as finished.
        """
        missing = {
            number: value
            for number, value in self._logged(trial.number).items()
            if number not in trial.intermediate_values
        }
        if missing:
            live_trial = optuna_study.attach(
                self._folder.path,
                trial.number,
                pruner=self._study.pruner,
                store=self._study._storage,  # pyright: ignore[reportPrivateUsage]
            )  # pyright: ignore[reportPrivateUsage]
            for number, value in missing.items():
                optuna_study.report(live_trial, value, number)

    def _logged(self, trial: int) -> dict[int, float]:
        """What the first seed's run reports of its evaluations if trials are pruned, from its
        journal.
        """
        point = next((point for point in self._folder.points() if point.setting == trial), None)
        if self._pruner is None or point is None:
            return {}
        values, evaluate = (
            journal.logged_values(point.run.metrics),
            compose.load(self._folder.config(point.number)).cfg.evaluate,
        )
        steps_per_epoch = next(
            (
                step / epochs
                for (step, name), epochs in values.items()
                if name == "epoch" and epochs
            ),
            0,
        )
        (metric,) = self._objectives
        return optuna_study.logged(
            values,
            metric.removeprefix("final/"),
            evaluate.every_steps or round((evaluate.every_epochs or 0) * steps_per_epoch),
        )

    def _tell_again(self, failed: FrozenTrial, values: list[float]) -> None:
        if not any(
            trial.user_attrs.get(_REPEATS) == failed.number
            for trial in self._study.get_trials(deepcopy=False)
        ):
            repeat = optuna.create_trial(
                params=failed.params,
                distributions=failed.distributions,
                values=values,
                user_attrs={_REPEATS: failed.number},
                intermediate_values=self._logged(failed.number),
            )
            self._study.add_trial(repeat)


def _suggest(trial: optuna.Trial, dimension: Dimension) -> str:
    """A trial's value for a dimension, in override syntax; an existing value is kept."""
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
