"""What a sweep's results come to: means over seeds, the best setting, the Pareto set."""

import dataclasses
import math

import pytest

from samewise.runner.records.sweep_folder import Point
from samewise.runner.sweeps.report.rows import setting_rows
from samewise.runner.sweeps.results import PointResult, State
from samewise.runner.sweeps.settings import Spread, pareto, rank_settings


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
