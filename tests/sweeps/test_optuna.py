"""Optuna's sweeper through ask and tell: it learns, and loses no trial however it ends."""

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.processes.this_process import REPORTER
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.sweepers.base import Result, Setting
from samewise.runner.sweepers.optuna import Optuna
from samewise.runner.sweepers.optuna_study import optuna, storage
from samewise.runner.sweepers.random import Random
from samewise.runner.sweepers.space import read_space
from samewise.runner.sweeps import engine
from samewise.runner.sweeps.results import PointResult, State
from samewise.runner.sweeps.settings import objective_means, pareto

BARE = Project(Path(__file__).parent)
SPACE = ("optimizer.lr=tag(log,interval(1e-4,1.0))", "optimizer.momentum=interval(0.0,1.0)")
COMPLETE, PRUNED, FAIL, RUNNING = (getattr(optuna.trial.TrialState, name) for name in ("COMPLETE", "PRUNED", "FAIL", "RUNNING"))


def open_sweeper(folder: Path, *given: str, **arguments: Any) -> Optuna:
    sweeper = Optuna(**arguments)
    folder.mkdir(exist_ok=True)
    sweeper.open(read_space(given or SPACE, project=BARE), folder, monitor="valid/loss", mode="min")
    return sweeper


def bowl(values: dict[str, str]) -> float:
    """A function whose minimum, 0, is at lr=0.01 and momentum=0.9."""
    return (math.log10(float(values["optimizer.lr"])) + 2) ** 2 + 10 * (float(values["optimizer.momentum"]) - 0.9) ** 2


def trials(folder: Path) -> list[Any]:
    return optuna.load_study(study_name=folder.name, storage=storage(folder)).trials


def write_down(folder: Path, *settings: Setting, run: Path | None = None) -> None:
    """Record the points, as the engine does before it starts a job; with `run`, create their run's folder."""
    if run is not None:
        run.mkdir()
    blank = {"name": "", "fingerprint": "", "folder": str(run or ""), "monitor": "valid/loss", "mode": "min", "needs": {}, "overrides": [], "seed": None}
    SweepFolder(folder).add_points([Point(number=one.number, setting=one.number, values=one.values, **blank) for one in settings])


def finish(sweeper: Optuna, objective: Callable[[Any], float] = bowl) -> list[Setting]:
    found = list[Setting]()
    while (setting := sweeper.ask()) is not None:
        found.append(setting)
        sweeper.tell(setting, Result("finished", {"valid/loss": objective(setting.values)}))
    return found


@pytest.mark.slow  # ten studies
def test_tpe_beats_random_search_by_the_median_of_ten_seeds(tmp_path: Path) -> None:
    space = read_space(SPACE, project=BARE)
    learned, drawn = list[float](), list[float]()
    for seed in range(10):
        learned.append(min(bowl(one.values) for one in finish(open_sweeper(tmp_path / str(seed), trials=30, seed=seed))))
        blind = Random(trials=30, seed=seed)
        blind.open(space, tmp_path, monitor="valid/loss", mode="min")
        drawn.append(min(bowl(one.values) for one in blind.settings()))
    assert statistics.median(learned) < statistics.median(drawn) / 2


def test_the_same_seed_suggests_the_same_even_if_interrupted(tmp_path: Path) -> None:
    whole = finish(open_sweeper(tmp_path / "whole", trials=14, seed=3))
    parts = list[Setting]()
    for number in (2, 11, 14):
        parts += finish(open_sweeper(tmp_path / "parts", trials=number, seed=3))
    assert parts == whole
    assert len({tuple(one.values.values()) for one in whole}) == 14
    assert finish(open_sweeper(tmp_path / "other", trials=14, seed=4)) != whole


def test_the_pareto_set_of_a_sweep_is_that_of_its_study(tmp_path: Path) -> None:
    objectives = {"valid/score": "max", "final/valid/loss": "min"}
    sweeper, draw, found = open_sweeper(tmp_path, sampler="random", objectives=objectives, trials=40), random.Random(0), list[PointResult]()
    while (setting := sweeper.ask()) is not None:
        seeds = list[PointResult]()
        for seed in range(2):
            point = Point(len(found) + seed, setting.number, str(seed), setting.values, [], "", "", f"{setting.number}/{seed}", "valid/score", "max", {})
            score, loss = (float(draw.randint(0, 5)) for _ in objectives)  # with ties
            state = State.failed if (setting.number, seed) == (3, 1) else State.finished
            if setting.number in (3, 4):  # the best of all, but one of the seeds fails, or is NaN
                score, loss = 9.0, math.nan if (setting.number, seed) == (4, 1) else 0.0
            seeds.append(PointResult(point, state, best={"valid/score": score}, final={"valid/loss": loss}, objectives=objectives))
        found += seeds
        sweeper.tell(setting, engine._combine(seeds))  # pyright: ignore[reportPrivateUsage]
    study = optuna.load_study(study_name=tmp_path.name, storage=storage(tmp_path))
    expected = {one.number: dict(zip(study.metric_names, one.values, strict=True)) for one in study.best_trials}
    assert {setting[0].point.setting: objective_means(setting) for setting in pareto(found)} == expected
    assert len(expected) > 1


# -- what it remembers


def test_a_trial_that_was_suggested_but_not_recorded_is_suggested_again(tmp_path: Path) -> None:
    first = open_sweeper(tmp_path, trials=5)
    asked = [first.ask(), first.ask()]
    write_down(tmp_path, asked[0])
    second = open_sweeper(tmp_path, trials=5)  # the first was killed between asking and writing
    again = second.ask()
    assert again == asked[1]
    assert [one.number for one in finish(second)] == [2, 3, 4]
    assert [one.state for one in trials(tmp_path)] == [RUNNING, RUNNING, COMPLETE, COMPLETE, COMPLETE]


def test_a_result_is_stored_once_and_a_retried_failure_counts(tmp_path: Path) -> None:
    sweeper = open_sweeper(tmp_path, trials=3)
    asked = [sweeper.ask() for _ in range(3)]
    write_down(tmp_path, *asked)
    for setting, state in zip(asked, ("finished", "failed", "pruned"), strict=True):
        sweeper.tell(setting, Result(state, {"valid/loss": 1.0} if state == "finished" else {}))
    assert [one.state for one in trials(tmp_path)] == [COMPLETE, FAIL, PRUNED]
    for _ in range(2):
        later = open_sweeper(tmp_path, trials=4)  # --retry-failed
        for setting in asked:
            later.tell(setting, Result("finished", {"valid/loss": 2.0}))
    states = [(one.state, one.value) for one in trials(tmp_path)]
    assert states == [(COMPLETE, 1.0), (FAIL, None), (PRUNED, None), (COMPLETE, 2.0)]
    assert trials(tmp_path)[3].params == trials(tmp_path)[1].params
    assert later.ask() is not None, "the repeat is no trial of its own"
    assert later.ask() is None


# -- what it refuses


@pytest.mark.parametrize(
    ("arguments", "path", "said"),
    [
        ({"pruner": "medain"}, "pruner", "did you mean 'median'"),
        ({"pruner": "median", "pruner_options": {"n_startup": 3}}, "pruner_options.n_startup", "n_startup_trials"),
        ({"trials": 0}, "trials", "at least 1"),
        ({"objectives": {"valid/loss": "less"}}, "objectives.valid/loss", "min or max"),
        ({"objectives": {"a": "min", "b": "max"}, "pruner": "median"}, "pruner", "cannot be pruned"),
        ({"objectives": {"a": "min", "b": "max"}, "sampler": "cmaes"}, "sampler", "one objective"),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(arguments: dict[str, Any], path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Optuna(**arguments)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert said in str(problem)


def test_only_the_first_seed_reports_and_only_if_trials_are_pruned(tmp_path: Path) -> None:
    assert open_sweeper(tmp_path).variables(Setting(0, {}), 0) == {}
    pruning = open_sweeper(tmp_path, pruner="median")
    assert set(pruning.variables(Setting(0, {}), 0)) == {REPORTER}
    assert pruning.variables(Setting(0, {}), 1) == {}
