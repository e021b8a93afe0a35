"""A sweep's Optuna study: its file, and samplers and pruners by name. Used by the sweep's process and by jobs that report to it."""

from __future__ import annotations

import inspect
import json
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
    from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
    from optuna.samplers import BaseSampler, CmaEsSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
    from optuna.storages.journal import JournalFileBackend, JournalStorage
    from optuna.study import StudyDirection
except ImportError as missing:
    raise ConfigError(Problem("sweeper", f"needs Optuna 5: {missing}", hint="pip install 'samewise[sweep]'")) from None

SAMPLERS: Mapping[str, type[BaseSampler]] = {"tpe": TPESampler, "gp": GPSampler, "cmaes": CmaEsSampler, "nsgaii": NSGAIISampler, "random": RandomSampler}
PRUNERS: Mapping[str, type[BasePruner]] = {"median": MedianPruner, "successive_halving": SuccessiveHalvingPruner, "hyperband": HyperbandPruner}
FILE = "optuna.log"
"""The study's journal, in the sweep's folder: what `optuna-dashboard` reads."""

optuna.logging.set_verbosity(optuna.logging.WARNING)


class _Journal(JournalFileBackend):
    """Optuna's journal file, under a lock that ends with the process that holds it.

    Optuna's own lock has others wait for half a minute.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append whole lines, after removing an unfinished last one. `make_durable` makes them durable."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with locks.hold(self._path, wait=True, sign=False), open(self._path, "ab+") as handle:
            cut_torn_line(handle.fileno())
            handle.write(lines.encode())


def storage(folder: Path) -> JournalStorage:
    """The study's storage in a sweep's folder."""
    return JournalStorage(_Journal(folder / FILE))


def make_durable(folder: Path) -> None:
    """Make what has been written to the study's file durable, whoever wrote it."""
    with open(folder / FILE, "rb") as handle:
        os.fsync(handle)


def sampler(name: str, options: Mapping[str, Any], *, seed: int) -> BaseSampler:
    """The sampler with this name in `SAMPLERS`; ConfigError if the choice, or one of its options, does not exist."""
    return _make(SAMPLERS, name, "sampler", {"seed": seed, **options})


def pruner(name: str | None, options: Mapping[str, Any]) -> BasePruner:
    """The pruner with this name in `PRUNERS`; None never stops a trial. ConfigError if the choice, or one of its options, does not exist."""
    return NopPruner() if name is None else _make(PRUNERS, name, "pruner", options)


def open_study(folder: Path, objectives: Mapping[str, str], *, sampler: BaseSampler, pruner: BasePruner) -> optuna.Study:
    """The study of a sweep, created if it does not exist yet."""
    directions = [StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE for mode in objectives.values()]
    study = optuna.create_study(storage=storage(folder), study_name=folder.name, directions=directions, sampler=sampler, pruner=pruner, load_if_exists=True)
    if study.metric_names is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(objectives))
    return study


def _make(classes: Mapping[str, type[Any]], name: str, path: str, options: Mapping[str, Any]) -> Any:
    if name not in classes:
        raise ConfigError(Problem(path, "no such choice", name, f"one of: {', '.join(classes)}", nearest(name, classes)))
    known = inspect.signature(classes[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        message = f"Optuna's {classes[name].__name__} has no such argument"
        raise ConfigError(*(Problem(f"{path}_options.{option}", message, options[option], hint=nearest(option, known)) for option in unknown))
    return call(classes[name], f"{path}_options", **options)
