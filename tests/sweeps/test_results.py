"""What a sweep's results come to: means over seeds, the best setting, effects of parameters, the Pareto set, cost."""

from __future__ import annotations

import dataclasses
import math

import pytest

from samewise.runner.records.sweep_folder import Point
from samewise.runner.sweeps.report.effects import effects, left_out, pareto
from samewise.runner.sweeps.report.rows import setting_rows
from samewise.runner.sweeps.results import PointResult, State
from samewise.runner.sweeps.settings import Spread, rank_settings


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


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_setting_with_a_seed_that_gave_nan_is_not_the_best(mode) -> None:
    found = [outcome(0, math.nan, mode, a="1"), outcome(1, 9.0, mode, a="2"), outcome(2, 5.0, mode, a="3"), outcome(3, math.nan, mode, a="4")]
    other_seed = dataclasses.replace(found[3].point, number=4, folder="runs/some/4")
    found.append(dataclasses.replace(found[3], point=other_seed, best={"valid/score": 100.0 if mode == "max" else 0.0}))
    best = [1, 2] if mode == "max" else [2, 1]
    assert [setting[0].point.setting for setting in rank_settings(found)] == [*best, 3, 0]


def test_the_pareto_set_holds_the_settings_that_no_other_beats() -> None:
    found = [outcome(number, 0, metrics={"up": up, "down": down}) for number, (up, down) in enumerate([(1, 1), (2, 2), (2, 3), (0, 0), (1, 2)])]
    assert pareto(found) == []
    found = [dataclasses.replace(one, objectives={"up": "max", "down": "min"}) for one in found]
    assert [setting[0].point.number for setting in pareto(found)] == [1, 0, 3]
