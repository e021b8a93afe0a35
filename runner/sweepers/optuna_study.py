"""Open a sweep's Optuna study, and make samplers and pruners by name.

The sweep's process uses this, and the jobs that report to it.
"""

import inspect
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samewise.runner.config.instantiate import call
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.records import locks
from samewise.runner.records.files import cut_torn_line

try:
    import optuna
    from optuna.pruners import (
        BasePruner,
        HyperbandPruner,
        MedianPruner,
        NopPruner,
        SuccessiveHalvingPruner,
    )
    from optuna.samplers import (
        BaseSampler,
        CmaEsSampler,
        GPSampler,
        NSGAIISampler,
        RandomSampler,
        TPESampler,
    )
    from optuna.storages import BaseStorage
    from optuna.storages.journal import JournalFileBackend, JournalStorage
    from optuna.study import StudyDirection
except ImportError as missing:
    raise ConfigError(
        Problem(
            "sweeper",
            f"needs Optuna 5: {missing}",
            hint="pip install '.[sweep]' in samewise's folder",
        )
    ) from None

SAMPLERS: Mapping[str, type[BaseSampler]] = {
    "tpe": TPESampler,
    "gp": GPSampler,
    "cmaes": CmaEsSampler,
    "nsgaii": NSGAIISampler,
    "random": RandomSampler,
}
PRUNERS: Mapping[str, type[BasePruner]] = {
    "median": MedianPruner,
    "successive_halving": SuccessiveHalvingPruner,
    "hyperband": HyperbandPruner,
}
FILE = "optuna.log"
"""The study's journal in the sweep's folder, which `optuna-dashboard` reads."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


# After a crash, Optuna's own lock makes others wait for half a minute
class _Journal(JournalFileBackend):
    """Optuna's journal file, under a lock that ends with the process that holds it."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append whole lines, after removing an unfinished last one.

        `make_durable` makes them durable.
        """
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with locks.hold(self._path, wait=True, sign=False), open(self._path, "ab+") as handle:
            cut_torn_line(handle.fileno())
            handle.write(lines.encode())


def storage(folder: Path) -> JournalStorage:
    """Return the study's storage in a sweep's folder."""
    return JournalStorage(_Journal(folder / FILE))


def make_durable(folder: Path) -> None:
    """Write the study's file to the disk, whoever has appended to it."""
    with open(folder / FILE, "rb") as handle:
        os.fsync(handle)


def sampler(name: str, options: Mapping[str, Any], *, seed: int) -> BaseSampler:
    """Return the sampler with this name in `SAMPLERS`.

    Raises:
        ConfigError: The sampler, or one of its options, does not exist.
    """
    return _make(SAMPLERS, name, "sampler", {"seed": seed, **options})


def pruner(name: str | None, options: Mapping[str, Any]) -> BasePruner:
    """Return the pruner with this name in `PRUNERS`; the pruner None never stops a trial.

    Raises:
        ConfigError: The pruner, or one of its options, does not exist.
    """
    return NopPruner() if name is None else _make(PRUNERS, name, "pruner", options)


def open_study(
    folder: Path, objectives: Mapping[str, str], *, sampler: BaseSampler, pruner: BasePruner
) -> optuna.Study:
    """Return the study of a sweep, created if it does not exist yet."""
    directions = [
        StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE
        for mode in objectives.values()
    ]
    study = optuna.create_study(
        storage=storage(folder),
        study_name=folder.name,
        directions=directions,
        sampler=sampler,
        pruner=pruner,
        load_if_exists=True,
    )
    if study.metric_names is None:
        # Optuna calls the names of metrics experimental
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(objectives))
    return study


def attach(
    folder: Path, number: int, *, pruner: BasePruner, store: BaseStorage | None = None
) -> optuna.Trial:
    """Return a trial of the sweep's study, to report its evaluations and to ask the pruner."""
    # The trial has its values: the sampler is never asked
    study = optuna.load_study(
        study_name=folder.name,
        storage=store or storage(folder),
        sampler=RandomSampler(),
        pruner=pruner,
    )
    return optuna.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)  # pyright: ignore[reportPrivateUsage]  (Optuna's way to attach to a trial)


def report(trial: optuna.Trial, value: float, number: int) -> bool:
    """Report an evaluation once, and return whether the pruner would stop the trial."""
    if number not in trial.storage.get_trial(trial._trial_id).intermediate_values:  # pyright: ignore[reportPrivateUsage]
        trial.report(value, number)
    return trial.should_prune()


def evaluation_number(step: int, interval: int) -> int:
    """Return the number of the evaluation at a step, from 1.

    Args:
        step: Step of the run.
        interval: Steps between two evaluations; 0: only at the end.
    """
    # A function of the step alone, so that it is the same after a resume
    return math.ceil(step / interval) if interval else 1


def metric_by_evaluation(
    values: Mapping[tuple[int, str], float], metric: str, interval: int
) -> dict[int, float]:
    """Return a metric's value at each evaluation of a run, by number, from its journal's values."""
    return {
        evaluation_number(step, interval): values[step, name]
        for step, name in sorted(values)
        if name == metric
    }


def _make(
    classes: Mapping[str, type[Any]], name: str, path: str, options: Mapping[str, Any]
) -> Any:
    if name not in classes:
        raise ConfigError(
            Problem(
                path,
                "no such choice",
                name,
                f"one of: {', '.join(classes)}",
                nearest(name, classes),
            )
        )
    parameters = inspect.signature(classes[name]).parameters
    unknown = [option for option in options if option not in parameters]
    ConfigError.raise_all(
        Problem(
            f"{path}_options.{option}",
            f"Optuna's {classes[name].__name__} has no such argument",
            options[option],
            hint=nearest(option, parameters),
        )
        for option in unknown
    )
    return call(classes[name], f"{path}_options", **options)
