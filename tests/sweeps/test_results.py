"""What a sweep's results come to: means over seeds, the best setting, effects of parameters, the Pareto set, cost."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from samewise.runner.launchers import job
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.sweeps.report import tables
from samewise.runner.sweeps.report.comparison import pages
from samewise.runner.sweeps.report.effects import effects, left_out, pareto
from samewise.runner.sweeps.report.rows import cost, cost_in_words, setting_rows
from samewise.runner.sweeps.report.tables import print_effects, print_settings, setting_values
from samewise.runner.sweeps.results import PointResult, State, point_results
from samewise.runner.sweeps.settings import Spread, rank_settings
from samewise.runner.tracking.journal import Journal


def outcome(number: int, value: float, mode: str = "max", state: State = State.finished, metrics: dict[str, float] | None = None, **values: str) -> PointResult:
    point = Point(number, number, None, values, [], "some", "f" * 64, f"runs/some/{number}", "valid/score", mode, {})
    return PointResult(point, state, best={"valid/score": value, **(metrics or {})})


def test_intervals_of_accuracies_are_clipped_and_those_of_two_seeds_marked() -> None:
    high, low = Spread.of([0.98, 0.9]), Spread.of([0.01, 0.03])
    assert high.interval("valid/accuracy") == (pytest.approx(0.94 - 12.706 * 0.04, abs=1e-3), 1.0)
    assert low.interval("ema/valid/accuracy_top5")[0] == 0.0
    assert low.interval("valid/loss")[0] < 0.0
    assert high.interval("valid/loss")[1] > 1.0
    assert all(map(math.isnan, Spread.of([0.5]).interval("valid/accuracy")))
    made = [outcome(number, value, a="1") for number, value in enumerate((0.98, 0.9, 0.95))]
    seeds = [dataclasses.replace(one, point=dataclasses.replace(one.point, setting=0, seed=number)) for number, one in enumerate(made)]
    assert setting_rows(seeds[:2])[0]["95 % interval"].endswith("(2 seeds: too few)")
    assert "few" not in setting_rows(seeds)[0]["95 % interval"]


def test_in_a_full_grid_the_shares_of_independent_settings_add_up_to_one() -> None:
    found = [outcome(number, 3 * a + b, a=str(a), b=str(b)) for number, (a, b) in enumerate((a, b) for a in range(2) for b in range(2))]
    first, second = effects(found)
    assert (first.key, second.key) == ("a", "b")
    assert first.share == pytest.approx(0.9)
    assert first.share + second.share == pytest.approx(1)
    assert first.best == "1"
    assert [level.spread.mean for level in first.levels] == [0.5, 3.5]


def test_the_best_value_follows_the_mode_of_the_experiment() -> None:
    assert effects([outcome(0, 1.0, "min", a="x"), outcome(1, 2.0, "min", a="y")])[0].best == "x"
    assert effects([outcome(0, 1.0, "max", a="x"), outcome(1, 2.0, "max", a="y")])[0].best == "y"


def test_constants_have_no_effect() -> None:
    (one,) = effects([outcome(0, 1.0, a="adam", b="1"), outcome(1, 2.0, a="sgd", b="1")])
    assert one.key == "a"


def test_many_values_are_grouped_into_ranges() -> None:
    (one,) = effects([outcome(number, float(number), a=repr(0.01 * (number + 1))) for number in range(20)])
    assert [level.name for level in one.levels] == ["0.01 to 0.05", "0.06 to 0.1", "0.11 to 0.15", "0.16 to 0.2"]
    assert [level.spread.count for level in one.levels] == [5, 5, 5, 5]


def test_settings_that_are_the_same_run_count_once() -> None:
    draws = [("1", 1.0), ("2", 4.0), ("1", 1.0), ("3", 2.0), ("2", 4.0), ("1", 1.0)]
    found = [outcome(number, value, a=drawn, b=str(number % 2)) for number, (drawn, value) in enumerate(draws)]
    found = [dataclasses.replace(one, point=dataclasses.replace(one.point, folder=f"runs/some/{one.point.values['a']}")) for one in found]
    (a, b) = sorted(effects(found), key=lambda one: one.key)
    assert math.isnan(a.share), "no value was tried more than once"
    assert [(level.spread.count, level.spread.mean) for level in a.levels] == [(1, 1.0), (1, 4.0), (1, 2.0)]
    assert [level.spread.count for level in b.levels] == [1, 2]
    assert left_out(found) == ""


def test_the_cost_has_every_try_and_the_time_of_unfinished_runs(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "some-1")
    folder.write_facts({})
    made = [dataclasses.replace(outcome(number, 0.5).point, folder=str(tmp_path / str(number))) for number in (0, 1)]
    folder.add_points(made)
    folder.note(0, began=1000.0, tries=1)  # killed
    made[0].run.path.mkdir()
    made[0].run.metrics.touch()
    os.utime(made[0].run.metrics, (1030.0, 1030.0))
    folder.note(1, began=1010.0, ended=1030.0, exit_code=3, tries=1)
    assert cost(folder, point_results(folder)).training_s == pytest.approx(30 + 20)
    job._begin(folder, 0)  # pyright: ignore[reportPrivateUsage]
    now = folder.word(0)["began"]
    folder.note(0, ended=now + 5, exit_code=3)
    spent = cost(folder, point_results(folder))
    assert spent.span_s == pytest.approx(now + 5 - 1000)
    assert spent.training_s == pytest.approx(30 + 5 + 20)
    assert cost_in_words(dataclasses.replace(spent, steps=1, tries=1)).startswith("0:55 of training, 1 step, 1 job started, ")


@pytest.mark.parametrize(("mode", "best"), [("max", 0.9), ("min", 0.1)])
def test_the_best_of_an_unfinished_point_is_its_best_so_far_and_not_its_last(tmp_path: Path, mode: str, best: float) -> None:
    folder = SweepFolder(tmp_path / "some-1")
    folder.write_facts({})
    point = dataclasses.replace(outcome(0, 0.5, mode).point, folder=str(tmp_path / "0"))
    folder.add_points([point])
    folder.note(0, began=1.0, ended=2.0, exit_code=3, pruned="at evaluation 4", tries=1)
    point.run.create()
    made = Journal(point.run.metrics, resume_step=None)
    for step, score in enumerate((math.nan, 0.5, 0.9, 0.1, 0.4), start=1):
        made.log({"train/loss": 1.0, "valid/score": score, "valid/loss": float(step)}, step)
        made.log({"train/loss": 2.0}, 10 + step)
    made.close()
    (one,) = point_results(folder)
    assert (one.state, one.value, one.final["valid/score"], one.steps) == (State.pruned, best, 0.4, 15)
    assert one.best == {"valid/score": best, "valid/loss": 3.0 if mode == "max" else 4.0}
    assert setting_rows([one])[0]["valid/score"] == str(best)


def test_a_point_that_is_the_same_run_as_one_that_failed_has_failed_with_it(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "some-1")
    folder.write_facts({})
    folder.add_points([dataclasses.replace(outcome(number, 0.5).point, folder=str(tmp_path / name)) for number, name in enumerate("aabb")])
    folder.note(0, began=1.0, ended=2.0, exit_code=1, said="the loss is not finite", tries=1)
    found = point_results(folder)
    assert [one.state for one in found] == [State.failed, State.failed, State.waiting, State.waiting]
    assert found[1].reason == "the same run as point 1, which failed: the loss is not finite"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_setting_with_a_seed_that_gave_nan_is_not_the_best(mode) -> None:
    found = [outcome(0, math.nan, mode, a="1"), outcome(1, 9.0, mode, a="2"), outcome(2, 5.0, mode, a="3"), outcome(3, math.nan, mode, a="4")]
    other_seed = dataclasses.replace(found[3].point, number=4, folder="runs/some/4")
    found.append(dataclasses.replace(found[3], point=other_seed, best={"valid/score": 100.0 if mode == "max" else 0.0}))
    best = [1, 2] if mode == "max" else [2, 1]
    assert [setting[0].point.setting for setting in rank_settings(found)] == [*best, 3, 0]


def seeds_of(setting: int, *ends: float | State, mode: str = "max") -> list[PointResult]:
    """A setting with a seed for each value, or state; a seed that failed has a metric of its last evaluation."""
    made = list[PointResult]()
    for seed, end in enumerate(ends):
        value, state = (end, State.finished) if isinstance(end, float) else (100.0 if mode == "max" else 0.0, end)
        one = outcome(10 * setting + seed, value, mode, state, a=str(setting))
        made.append(dataclasses.replace(one, point=dataclasses.replace(one.point, setting=setting, seed=str(seed))))
    return made


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("end", [State.failed, State.pruned])
def test_a_setting_with_a_seed_that_failed_is_never_ahead_of_a_complete_one(mode, end, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = 9.0 if mode == "max" else 1.0
    lacking, complete = seeds_of(0, best, end, end, mode=mode), seeds_of(1, 5.0, 6.0, 5.5, mode=mode)
    ended, unfinished = seeds_of(2, end, end, end, mode=mode), seeds_of(3, 5.0, State.running, State.waiting, mode=mode)
    found = [*ended, *lacking, *complete, *unfinished]
    order = [1, 3] if mode == "max" else [3, 1]
    assert [setting[0].point.setting for setting in rank_settings(found)] == [*order, 0, 2]
    (effect,) = effects(found)
    assert [(level.name, level.spread.count) for level in effect.levels] == [("1", 1), ("3", 1)]
    assert effect.best == str(order[0])
    assert left_out(found).startswith("The effects are those of 2 of 4 settings")
    assert [row["state"] for row in setting_rows(found, exact=True)][2:] == [f"1 finished, 2 {end}", f"3 {end}"]
    assert setting_values(lacking)["states"] == {"finished": 1, end.value: 2}
    print_settings(SweepFolder(tmp_path / "some-1"), found)
    told = capsys.readouterr().out
    assert f"best     a={order[0]}\n" in told
    assert "1 setting has a seed that failed, was pruned or gave NaN, and cannot be the best" in told
    print_settings(SweepFolder(tmp_path / "some-1"), lacking)
    print_effects(effects(lacking), left_out(lacking))
    told = capsys.readouterr().out
    assert "best  " not in told
    assert "0 of 1 settings" in " ".join(told.split())


def test_the_pareto_set_holds_the_settings_that_no_other_beats() -> None:
    found = [outcome(number, 0, metrics={"up": up, "down": down}) for number, (up, down) in enumerate([(1, 1), (2, 2), (2, 3), (0, 0), (1, 2)])]
    assert pareto(found) == []
    found = [dataclasses.replace(one, objectives={"up": "max", "down": "min"}) for one in found]
    assert [setting[0].point.number for setting in pareto(found)] == [1, 0, 3]


@pytest.mark.parametrize(("tries", "filter_by"), [((1, 1), "tags.sweep = 'some-1'"), ((1, 0), "attributes.run_id IN ('run1', 'run0')")])
def test_the_tables_address_includes_runs_that_another_sweep_trained(tmp_path, tries, filter_by) -> None:
    folder = SweepFolder(tmp_path / "sweeps" / "some-1")
    facts = {"id": "some-1", "name": "some", "overrides": [], "root": "", "packages": [], "configs": []}
    parts = {"launcher": {"_target_": ""}, "sweeper": {"_target_": ""}, "tracking": {"enabled": True, "uri": "http://host:5000/"}}
    folder.write_facts({**facts, **parts, "run_root": str(tmp_path)})
    found = []
    for number, count in enumerate(tries):
        one = outcome(number, float(number), a=str(number))
        one = dataclasses.replace(one, point=dataclasses.replace(one.point, folder=str(tmp_path / str(number))), tries=count)
        one.point.run.path.mkdir()
        one.point.run.tracking.write_text(json.dumps({"run_id": f"run{number}", "experiment_id": "7"}))
        found.append(one)
    at = pages(folder, found)
    assert at is not None
    assert f"searchFilter={filter_by}&" in unquote(at.table)
    assert unquote(at.compare) == 'http://host:5000/#/compare-runs?runs=["run1","run0"]&experiments=["7"]&workflowType=machine_learning'
    assert at.opens == ""
    at = pages(folder, [dataclasses.replace(one, final={"valid/loss": -one.value}, objectives={"final/valid/loss": "min"}) for one in found])
    assert at is not None
    assert "orderByKey=metrics.`valid/loss`&orderByAsc=true" in unquote(at.table)


@pytest.mark.parametrize("width", [200, 80, 60])
def test_a_table_on_a_narrow_terminal_keeps_every_value_whole(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    runs = {"1d10cc18": ("debug=tiny", 0.1, "0.2188"), "a52e6884": ("debug=tiny label_smoothing=0.2", 0.2, "0.25")}
    common = {"name": "resnet18_digits", "state": "finished"}
    rows = [
        {**common, "run": run, "overridden": label, "recipe.label_smoothing": smoothing, "valid/accuracy": value, "changed": "27 min ago"}
        for run, (label, smoothing, value) in runs.items()
    ]
    tables.print_rows(rows, right=("changed",))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert (lines[0] == "in all: name resnet18_digits  state finished  changed 27 min ago") == (width < 200)
    for run, (_, smoothing, value) in runs.items():
        (line,) = (line for line in lines if run in line)
        assert {str(smoothing), value} <= {*line.split()}
        assert ("27 min ago" in line) == (width == 200)
    assert max(map(len, lines[1:])) <= width
    words = "".join("".join(lines).split())
    assert (words.count("debug=tiny"), words.count("label_smoothing=0.2")) == (2, 1), "what is wrapped is not cut"
